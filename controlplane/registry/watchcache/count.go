package watchcache

import "keelson.dev/keelson/controlplane/api"

// Count returns the number of cached objects of a kind; 0 if the kind is not served.
func (r Reader) Count(k *api.Kind) int {
	s := r.cache.ByKind(k)
	if s == nil {
		return 0
	}
	if current := s.storage.snap.Load(); current != nil {
		return current.byKey.Len()
	}
	return 0
}
