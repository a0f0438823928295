// Package pairs is how key pairs come to proxies: the control plane writes those that a proxy may serve into Secrets of the
// proxies' own namespace, under the names of Files, and the proxy's pod mounts them. No proxy has a right to any Secret.
// It is pure.
package pairs

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Files are the names of the files that hold the pair of a Secret. The names of both may be longer than a file's.
func Files(namespace, name string) (certificate, key string) {
	sum := sha256.Sum256([]byte(namespace + "/" + name))
	at := hex.EncodeToString(sum[:16])
	return at + ".crt", at + ".key"
}

// Keys remembers the key pairs of Secrets by their UID and revision: reading one costs more than everything else that is
// worked out. The zero value is ready, and nil reads each time.
type Keys struct {
	mu   sync.Mutex
	kept map[types.UID]keptPair
}

type keptPair struct {
	revision string
	pair     *tls.Certificate
	err      error
}

// mostKeys bounds what Keys remembers; beyond it, it begins anew.
const mostKeys = 4096

// Of reads the key pair of a Secret.
func (k *Keys) Of(s *corev1.Secret) (*tls.Certificate, error) {
	if k == nil || s.UID == "" {
		return read(s)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if have, ok := k.kept[s.UID]; ok && have.revision == s.ResourceVersion {
		return have.pair, have.err
	}
	if k.kept == nil || len(k.kept) >= mostKeys {
		k.kept = map[types.UID]keptPair{}
	}
	pair, err := read(s)
	k.kept[s.UID] = keptPair{revision: s.ResourceVersion, pair: pair, err: err}
	return pair, err
}

func read(s *corev1.Secret) (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil, err
	}
	return &pair, nil
}
