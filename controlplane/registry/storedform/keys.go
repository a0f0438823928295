package storedform

import (
	"fmt"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation/path"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// All keys of the registry have the prefix Root. The api.Storage of a kind defines the prefix of
// its objects below Root.
const (
	Root             = api.StorageRoot
	ReservationsRoot = Root + "keelson.dev/reservations/"
)

// ObjectKey returns an object's key relative to the storage's prefix: "namespace/name" or "name".
func ObjectKey(k *api.Kind, namespace, name string) string {
	return joinKey(k.Namespaced, namespace, name)
}

func joinKey(namespaced bool, namespace, name string) string {
	if !namespaced {
		return name
	}
	return namespace + "/" + name
}

// SplitKey returns the namespace and the name in an object's key, which is relative to the
// storage's prefix. The namespace is empty if namespaced is false.
func SplitKey(namespaced bool, key string) (namespace, name string) {
	if !namespaced {
		return "", key
	}
	namespace, name, _ = strings.Cut(key, "/")
	return namespace, name
}

// ReservationKey returns the key in the store that reserves a unique value, such as a cluster IP.
func ReservationKey(res api.Reservation) string {
	return ReservationsRoot + res.Space + "/" + res.Value
}

// WhyInvalidName returns the reason why a name cannot be part of a key. It returns "" if the name
// is valid.
func WhyInvalidName(name string) string {
	return strings.Join(apivalidation.IsValidPathSegmentName(name), ", ")
}

// FormatRevision returns a store revision as a resourceVersion.
func FormatRevision(rev raftstore.Revision) string { return strconv.FormatUint(uint64(rev), 10) }

// ParseRevision returns the store revision of a resourceVersion. "" and "0" are revision 0. The
// error is a 400.
func ParseRevision(text string) (raftstore.Revision, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid resource version %q: it is not a number", text))
	}
	return raftstore.Revision(n), nil
}
