"""What a decoder layer is made of: small modules, each a pytree of its arrays that is called."""
