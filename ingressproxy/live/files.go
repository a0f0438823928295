package live

import (
	"encoding/hex"
	"hash/fnv"
	"path/filepath"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/ingressproxy/pairs"
	"keelson.dev/keelson/internal/filewatch"
)

// maxFileBytes is the maximum size of a key pair's file in bytes, the same as of a Secret.
const maxFileBytes = 1 << 20

// certificateFiles reads TLS key pairs from a folder that the control plane fills. It caches them
// until clearCache is called.
type certificateFiles struct {
	folder string

	mu    sync.Mutex
	cache map[types.NamespacedName]*corev1.Secret // a nil value means that the folder has no key pair of this name
}

// clearCache discards the cached key pairs, so that they are read again.
func (f *certificateFiles) clearCache() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cache = nil
}

// cachedSecret returns the key pair of the Secret with this name, as read from the folder, in the
// form of that Secret. It returns nil if the folder has no such key pair.
func (f *certificateFiles) cachedSecret(namespace, name string) *corev1.Secret {
	f.mu.Lock() // held while files are read, so that no older result is cached after clearCache
	defer f.mu.Unlock()
	key := types.NamespacedName{Namespace: namespace, Name: name}
	if s, ok := f.cache[key]; ok {
		return s
	}
	if f.cache == nil {
		f.cache = map[types.NamespacedName]*corev1.Secret{}
	}
	s := f.loadSecret(key)
	f.cache[key] = s
	return s
}

func (f *certificateFiles) loadSecret(of types.NamespacedName) *corev1.Secret {
	certificate, key := pairs.FileNames(of.Namespace, of.Name)
	crt, err := filewatch.Read(filepath.Join(f.folder, certificate), maxFileBytes)
	if err != nil {
		return nil
	}
	private, err := filewatch.Read(filepath.Join(f.folder, key), maxFileBytes)
	if err != nil {
		return nil
	}
	sum := fnv.New128a()
	sum.Write(crt)
	sum.Write(private)
	return &corev1.Secret{
		// The UID is the key of pairs.Cache; the resource version changes with the content.
		ObjectMeta: metav1.ObjectMeta{Namespace: of.Namespace, Name: of.Name, UID: types.UID(of.String()),
			ResourceVersion: hex.EncodeToString(sum.Sum(nil))},
		Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: crt, corev1.TLSPrivateKeyKey: private},
	}
}
