package registry

import (
	"strings"

	apivalidation "k8s.io/apimachinery/pkg/api/validation/path"

	"keelson.dev/keelson/controlplane/api"
)

// All keys of the registry have the prefix root. The api.Storage of a kind defines its prefix below
// root.
const (
	root             = api.StorageRoot
	reservationsRoot = root + "keelson.dev/reservations/"
)

// objectKey returns an object's key relative to the storage's prefix: "namespace/name" or "name".
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

// badPathSegment returns why a name is invalid in a key; "" if it is valid.
func badPathSegment(name string) string {
	return strings.Join(apivalidation.IsValidPathSegmentName(name), ", ")
}
