package registry

import (
	"fmt"
	"strings"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// Form reads and writes objects of a kind as they lie in a store that nobody serves.
type Form struct{ codec codec }

// FormOf is the form in which objects of a storage lie.
func FormOf(s *api.Storage) Form { return Form{newCodec(s)} }

// Key is where an object lies. Of the beginning of a name it is the beginning of the key.
func (f Form) Key(namespace, name string) string {
	return f.codec.storage.Prefix + storedKey(f.codec.storage.Namespaced, namespace, name)
}

// Decode reads an object in the version of the storage's hub.
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

// Encode is the stored form of an object of the hub's version. Who manages its fields is left out, since the form of that
// follows what the store's cluster understands.
func (f Form) Encode(obj api.Object) ([]byte, error) {
	obj = obj.DeepCopyObject().(api.Object)
	obj.SetManagedFields(nil)
	return f.Rewrite(obj)
}

// Rewrite is the stored form of an object that Decode has read from the same store: who manages its fields is as it was.
func (f Form) Rewrite(obj api.Object) ([]byte, error) {
	obj = obj.DeepCopyObject().(api.Object)
	obj.SetResourceVersion("")
	return f.codec.encode(obj)
}
