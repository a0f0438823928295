package registry

import (
	"context"
	"strings"

	"keelson.dev/keelson/controlplane/api"
)

// Held returns the objects of a namespace in their stored version, at the given resourceVersion or
// later; "" means the current state. The objects are shared. The call is cheap if the kind has no
// objects.
func (r *Registry) Held(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error) {
	s, err := r.served(ctx, &api.Request{Kind: k, Verb: api.VerbList, Namespace: namespace})
	if err != nil {
		return nil, err
	}
	if err := r.notOlderThan(ctx, resourceVersion); err != nil {
		return nil, statusError(err, "list "+k.Resource+" of "+namespace)
	}
	now := s.snap.Load()
	if now.byKey.Len() == 0 {
		return nil, nil
	}
	var out []api.Object
	var broken error
	prefix := namespace + "/"
	now.byKey.Ascend(prefix, func(key string, e *entry) bool {
		if !strings.HasPrefix(key, prefix) {
			return false
		}
		obj, err := s.whole(e)
		if err != nil {
			broken = err
			return false
		}
		out = append(out, obj)
		return true
	})
	if broken != nil {
		return nil, statusError(broken, "list "+k.Resource+" of "+namespace)
	}
	return out, nil
}
