package registry

import (
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// Companions says which other objects change with one that is made (made) or
// removed, whichever way. Of an object that could not be read only the name is known.
type Companions func(obj api.Object, made bool, now time.Time) []api.Companion

// WithCompanions sets the companions of the objects of like's type.
func WithCompanions(like api.Object, of Companions) Option {
	return func(r *Registry) {
		if r.companions == nil {
			r.companions = make(map[*api.Kind]Companions)
		}
		r.companions[r.kinds.ByType(like)] = of
	}
}
