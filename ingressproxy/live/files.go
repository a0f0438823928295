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

// mostFile bounds a key pair's file, in bytes: a Secret is not larger.
const mostFile = 1 << 20

// files are the key pairs of a folder, each read once until the folder has changed.
type files struct {
	folder string

	mu   sync.Mutex
	read map[types.NamespacedName]*corev1.Secret // nil: there is none
}

// forget has all files read anew.
func (f *files) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.read = nil
}

// secret is a Secret of what the folder has of it, nil where that is no pair.
func (f *files) secret(namespace, name string) *corev1.Secret {
	f.mu.Lock() // held while files are read: what was read before forget is not kept after it
	defer f.mu.Unlock()
	key := types.NamespacedName{Namespace: namespace, Name: name}
	if s, ok := f.read[key]; ok {
		return s
	}
	if f.read == nil {
		f.read = map[types.NamespacedName]*corev1.Secret{}
	}
	s := f.load(key)
	f.read[key] = s
	return s
}

func (f *files) load(of types.NamespacedName) *corev1.Secret {
	certificate, key := pairs.Files(of.Namespace, of.Name)
	crt, err := filewatch.Read(filepath.Join(f.folder, certificate), mostFile)
	if err != nil {
		return nil
	}
	private, err := filewatch.Read(filepath.Join(f.folder, key), mostFile)
	if err != nil {
		return nil
	}
	sum := fnv.New128a()
	sum.Write(crt)
	sum.Write(private)
	return &corev1.Secret{
		// The UID is only for those that keep what they have read; the revision changes with the content.
		ObjectMeta: metav1.ObjectMeta{Namespace: of.Namespace, Name: of.Name, UID: types.UID(of.String()), ResourceVersion: hex.EncodeToString(sum.Sum(nil))},
		Type:       corev1.SecretTypeTLS,
		Data:       map[string][]byte{corev1.TLSCertKey: crt, corev1.TLSPrivateKeyKey: private},
	}
}
