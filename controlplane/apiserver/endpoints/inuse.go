package endpoints

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// inUse has the encodings that watches are sending now. Any number of watches that send the same version of an object,
// however slowly and however long ago it was replaced, hold its bytes once, and it is encoded once for them.
type inUse struct {
	mu   sync.Mutex
	each map[encodingKey]*shared
}

type encodingKey struct {
	object runtime.Object // this very version: watches share the objects themselves
	as     shape
}

// shape is everything by which the bytes of an object may differ among those who watch it.
type shape struct {
	format  Format
	include metav1.IncludeObjectPolicy
	headed  bool
}

type shared struct {
	users int // under inUse.mu
	once  sync.Once
	data  []byte
	err   error
}

// get returns the encoding that make makes, and what must be called when the bytes are not needed any more.
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
