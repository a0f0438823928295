package registry

import (
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// Companions returns writes of other objects that must be committed together with the creation or
// removal of obj. created is false for a removal. If obj is unreadable (its stored value cannot be
// decoded), only its name, namespace and resourceVersion are set.
type Companions func(obj api.Object, created bool, now time.Time) []api.Companion

// WithCompanions makes every creation and removal of an object of the given object's type also
// commit the writes that companions returns.
func WithCompanions(object api.Object, companions Companions) Option {
	return func(r *Registry) {
		if r.companions == nil {
			r.companions = make(map[*api.Kind]Companions)
		}
		r.companions[r.kinds.ByType(object)] = companions
	}
}
