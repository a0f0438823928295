package watchcache

import (
	"context"
	"strings"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
)

// Held returns the objects of a namespace, in the version in which they are stored, from a cached
// state. The state has at least the given resourceVersion; "" means the newest state. The objects
// are shared: do not modify them. The call is cheap if the kind has no objects.
func (r Reader) Held(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error) {
	s, err := r.cache.Served(ctx, &api.Request{Kind: k, Verb: api.VerbList, Namespace: namespace})
	if err != nil {
		return nil, err
	}
	if err := r.waitForVersion(ctx, s, OpList, resourceVersion); err != nil {
		return nil, storeerrors.ToStatus(err, "list "+k.Resource+" of "+namespace)
	}
	current := s.storage.snap.Load()
	if current.byKey.Len() == 0 {
		return nil, nil
	}
	var out []api.Object
	var failed error
	prefix := namespace + "/"
	current.byKey.Ascend(prefix, func(key string, e *Entry) bool {
		if !strings.HasPrefix(key, prefix) {
			return false
		}
		obj, err := s.storage.completeObject(e)
		if err != nil {
			failed = err
			return false
		}
		out = append(out, obj)
		return true
	})
	if failed != nil {
		return nil, storeerrors.ToStatus(failed, "list "+k.Resource+" of "+namespace)
	}
	return out, nil
}
