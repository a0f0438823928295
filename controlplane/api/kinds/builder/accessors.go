package builder

import (
	"keelson.dev/keelson/controlplane/api"
)

// copied is a constraint for pointer types *T with a generated DeepCopy method.
type copied[T any] interface {
	*T
	DeepCopy() *T
}

// SeparateSpecAndStatus makes the spec and the status of a kind separately writable, as
// SeparateStatus does. spec and status return a pointer to that field of an object.
func SeparateSpecAndStatus[P api.Object, S, T any, PS copied[S], PT copied[T]](
	k *api.Kind, spec func(P) *S, status func(P) *T,
) {
	var none P
	SeparateStatus(k, status, Accessors[P]{
		Spec:     func(o P) any { return *spec(o) },
		CopySpec: func(obj, old P) { *spec(obj) = *PS(spec(old)).DeepCopy() },
		Status: func(obj, old P) {
			if any(old) == any(none) {
				var empty T
				*status(obj) = empty
				return
			}
			*status(obj) = *PT(status(old)).DeepCopy()
		},
	})
}
