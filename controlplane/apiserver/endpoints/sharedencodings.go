package endpoints

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// sharedEncodings holds the encoded objects that watches are currently sending. An object version
// is encoded once, and all watches that send it share the bytes, even if they are slow or the
// version is already replaced.
type sharedEncodings struct {
	mu        sync.Mutex
	encodings map[encodingKey]*sharedEncoding
}

type encodingKey struct {
	object runtime.Object // identifies the version: watches share object pointers
	shape  encodingShape
}

// encodingShape contains all options of a watch that affect the encoded bytes of an object.
type encodingShape struct {
	format  Format
	include metav1.IncludeObjectPolicy
	headed  bool
}

type sharedEncoding struct {
	users int // guarded by sharedEncodings.mu
	once  sync.Once
	data  []byte
	err   error
}

// encodeShared returns the encoding of obj in the given shape. It calls encode unless another watch
// is using the same encoding. The caller must call release when it no longer needs the bytes.
func (u *sharedEncodings) encodeShared(obj runtime.Object, shape encodingShape,
	encode func() ([]byte, error)) (data []byte, release func(), err error) {
	key := encodingKey{obj, shape}
	u.mu.Lock()
	if u.encodings == nil {
		u.encodings = map[encodingKey]*sharedEncoding{}
	}
	s := u.encodings[key]
	if s == nil {
		s = &sharedEncoding{}
		u.encodings[key] = s
	}
	s.users++
	u.mu.Unlock()
	s.once.Do(func() { s.data, s.err = encode() })
	return s.data, func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		if s.users--; s.users == 0 {
			delete(u.encodings, key)
		}
	}, s.err
}
