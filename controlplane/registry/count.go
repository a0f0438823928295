package registry

import "keelson.dev/keelson/controlplane/api"

// Count returns the number of cached objects of a kind; 0 if the kind is not served.
func (r *Registry) Count(k *api.Kind) int {
	s := r.cache.routes.Load().byKind[k]
	if s == nil {
		return 0
	}
	if now := s.snap.Load(); now != nil {
		return now.byKey.Len()
	}
	return 0
}
