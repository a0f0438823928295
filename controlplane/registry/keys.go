package registry

import (
	"strings"

	apivalidation "k8s.io/apimachinery/pkg/api/validation/path"

	"keelson.dev/keelson/controlplane/api"
)

// Everything that the registry stores lies below root; where the objects of a kind do is said by its api.Storage.
const (
	root             = api.StorageRoot
	reservationsRoot = root + "keelson.dev/reservations/"
)

// objectKey is the part of a key below the storage's prefix: "namespace/name" or "name".
func objectKey(k *api.Kind, namespace, name string) string {
	return storedKey(k.Namespaced, namespace, name)
}

func storedKey(namespaced bool, namespace, name string) string {
	if !namespaced {
		return name
	}
	return namespace + "/" + name
}

// splitKey is the inverse of storedKey.
func splitKey(namespaced bool, key string) (namespace, name string) {
	if !namespaced {
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
