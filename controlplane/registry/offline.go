package registry

import (
	"fmt"
	"strings"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// Form encodes and decodes objects of a storage in a store that is not being served (offline
// tools).
type Form struct{ codec codec }

// FormOf returns the stored form of a storage's objects.
func FormOf(s *api.Storage) Form { return Form{newCodec(s)} }

// Key returns the key of an object. For a prefix of a name it returns the prefix of the key.
func (f Form) Key(namespace, name string) string {
	return f.codec.storage.Prefix + storedKey(f.codec.storage.Namespaced, namespace, name)
}

// Decode decodes a stored object, converted to the storage's hub version.
func (f Form) Decode(it raftstore.Item) (api.Object, error) {
	key, ok := strings.CutPrefix(it.Key, f.codec.storage.Prefix)
	if !ok {
		return nil, fmt.Errorf("%s lies elsewhere than %s", it.Key, f.codec.storage.Prefix)
	}
	obj, v, err := f.codec.decodeNamed(key, it.Value)
	if err == nil && v != &f.codec.storage.Hub {
		err = fmt.Errorf("%s is stored as %s, which nothing here converts", it.Key, v.GVK)
	}
	return obj, err
}

// Encode returns the stored form of an object in the hub version, without managedFields. Their form
// depends on the feature level of the store's cluster.
func (f Form) Encode(obj api.Object) ([]byte, error) {
	obj = obj.DeepCopyObject().(api.Object)
	obj.SetManagedFields(nil)
	return f.Rewrite(obj)
}

// Rewrite returns the stored form of an object that Decode has read from the same store, with its
// managedFields unchanged.
func (f Form) Rewrite(obj api.Object) ([]byte, error) {
	obj = obj.DeepCopyObject().(api.Object)
	obj.SetResourceVersion("")
	return f.codec.encode(obj)
}
