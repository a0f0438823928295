package endpoints

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// inUse holds the encoded objects that watches are currently sending. All watches that send the
// same version of an object share its bytes, and it is encoded once. This holds for slow watches
// and for replaced versions, too.
type inUse struct {
	mu   sync.Mutex
	each map[encodingKey]*shared
}

type encodingKey struct {
	object runtime.Object // identifies the version: watches share object pointers
	as     shape
}

// shape holds all options of a watch that change the encoded bytes of an object.
type shape struct {
	format  Format
	include metav1.IncludeObjectPolicy
	headed  bool
}

type shared struct {
	users int // guarded by inUse.mu
	once  sync.Once
	data  []byte
	err   error
}

// get returns the encoding of obj in the given shape. It calls make unless another watch is using
// the same encoding. The caller must call release when it no longer needs the bytes.
func (u *inUse) get(obj runtime.Object, as shape,
	make func() ([]byte, error)) (data []byte, release func(), err error) {
	key := encodingKey{obj, as}
	u.mu.Lock()
	if u.each == nil {
		u.each = map[encodingKey]*shared{}
	}
	s := u.each[key]
	if s == nil {
		s = &shared{}
		u.each[key] = s
	}
	s.users++
	u.mu.Unlock()
	s.once.Do(func() { s.data, s.err = make() })
	return s.data, func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		if s.users--; s.users == 0 {
			delete(u.each, key)
		}
	}, s.err
}
