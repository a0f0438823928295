package registry

import (
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// Companions returns the changes of other objects that accompany the creation (made) or removal of
// obj. If obj is unreadable, only its name is set.
type Companions func(obj api.Object, made bool, now time.Time) []api.Companion

// WithCompanions sets the companions of objects of like's type.
func WithCompanions(like api.Object, of Companions) Option {
	return func(r *Registry) {
		if r.companions == nil {
			r.companions = make(map[*api.Kind]Companions)
		}
		r.companions[r.kinds.ByType(like)] = of
	}
}
