package registry

import (
	"strings"

	apivalidation "k8s.io/apimachinery/pkg/api/validation/path"

	"keelson.dev/keelson/controlplane/api"
)

// Everything that the registry stores lies below root.
const (
	root             = "/registry/"
	reservationsRoot = root + "keelson.dev/reservations/"
)

// kindPrefixes gives every stored kind its place: /registry/{resource}/. When two
// groups have a resource of the same name, the later one is told apart by its group.
func kindPrefixes(kinds *api.Kinds) map[*api.Kind]string {
	out := make(map[*api.Kind]string)
	taken := make(map[string]bool)
	for _, k := range kinds.All() {
		if k.Virtual {
			continue
		}
		p := root + k.Resource + "/"
		if taken[p] {
			p = root + k.GVK.Group + "/" + k.Resource + "/"
		}
		taken[p] = true
		out[k] = p
	}
	return out
}

// objectKey is the part of a key below the kind's prefix: "namespace/name" or "name".
func objectKey(k *api.Kind, namespace, name string) string {
	if !k.Namespaced {
		return name
	}
	return namespace + "/" + name
}

// splitKey is the inverse of objectKey.
func splitKey(k *api.Kind, key string) (namespace, name string) {
	if !k.Namespaced {
		return "", key
	}
	namespace, name, _ = strings.Cut(key, "/")
	return namespace, name
}

func reservationKey(res api.Reservation) string {
	return reservationsRoot + res.Space + "/" + res.Value
}

// badPathSegment says why a name cannot be part of a key; "" when it can.
func badPathSegment(name string) string {
	return strings.Join(apivalidation.IsValidPathSegmentName(name), ", ")
}
