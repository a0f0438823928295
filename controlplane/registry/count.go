package registry

import "keelson.dev/keelson/controlplane/api"

// Count is how many objects of a kind are stored, as far as this replica knows; 0 for a kind that is not served.
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
