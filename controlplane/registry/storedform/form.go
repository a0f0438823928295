package storedform

import (
	"fmt"
	"strings"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// Form encodes and decodes the stored values of a storage for offline tools, which access a store
// that no replica serves.
type Form struct{ codec Codec }

// NewForm returns the Form of a storage.
func NewForm(s *api.Storage) Form { return Form{NewCodec(s)} }

// Key returns the key of an object in the store. If name is only the prefix of an object name, the
// result is a prefix of the object's key.
func (f Form) Key(namespace, name string) string {
	return f.codec.storage.Prefix + joinKey(f.codec.storage.Namespaced, namespace, name)
}

// Decode returns the object in a stored item, converted to the storage's hub version. It returns an
// error if the key of the item is not that of the object.
func (f Form) Decode(item raftstore.Item) (api.Object, error) {
	key, ok := strings.CutPrefix(item.Key, f.codec.storage.Prefix)
	if !ok {
		return nil, fmt.Errorf("%s is not below %s", item.Key, f.codec.storage.Prefix)
	}
	obj, v, err := f.codec.DecodeNamed(key, item.Value)
	if err == nil && v != &f.codec.storage.Hub {
		err = fmt.Errorf("%s is stored as %s, which has no local conversion", item.Key, v.GVK)
	}
	return obj, err
}

// Encode returns the stored value of an object in the hub version. It omits managedFields, because
// their encoding depends on the feature level of the store's cluster.
func (f Form) Encode(obj api.Object) ([]byte, error) {
	obj = obj.DeepCopyObject().(api.Object)
	obj.SetManagedFields(nil)
	return f.Rewrite(obj)
}

// Rewrite returns the stored value of an object that Decode returned. Unlike Encode, it keeps the
// managedFields unchanged, so the value is valid only for the store from which the object was read.
func (f Form) Rewrite(obj api.Object) ([]byte, error) {
	obj = obj.DeepCopyObject().(api.Object)
	obj.SetResourceVersion("")
	return f.codec.Encode(obj)
}
