// Package pairs defines how TLS key pairs are passed to the proxies. The control plane copies the
// key pairs that a proxy may use into Secrets in the namespace of the proxies. The keys of these
// Secrets are the names that FileNames returns. The proxy's pod mounts the Secrets as files, so
// that no proxy needs the right to read Secrets through the API. The package does no I/O.
package pairs

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// FileNames returns the names of the two files with the TLS key pair of the Secret namespace/name.
// The names are hashes, because a namespace and a name together can be longer than a file name may
// be.
func FileNames(namespace, name string) (certificate, key string) {
	sum := sha256.Sum256([]byte(namespace + "/" + name))
	at := hex.EncodeToString(sum[:16])
	return at + ".crt", at + ".key"
}

// Cache caches parsed key pairs of Secrets by UID and resource version, because parsing is the most
// expensive part of an evaluation. It is safe for concurrent use. The zero value is ready for use;
// a nil Cache parses each time.
type Cache struct {
	mu      sync.Mutex
	entries map[types.UID]cacheEntry
}

type cacheEntry struct {
	revision string
	pair     *tls.Certificate
	err      error
}

// maxCachedPairs is the maximum number of entries of a Cache. A full Cache is emptied.
const maxCachedPairs = 4096

// KeyPair returns the parsed TLS key pair in Secret s, or an error if s has no valid key pair.
func (k *Cache) KeyPair(s *corev1.Secret) (*tls.Certificate, error) {
	if k == nil || s.UID == "" {
		return parseKeyPair(s)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if have, ok := k.entries[s.UID]; ok && have.revision == s.ResourceVersion {
		return have.pair, have.err
	}
	if k.entries == nil || len(k.entries) >= maxCachedPairs {
		k.entries = map[types.UID]cacheEntry{}
	}
	pair, err := parseKeyPair(s)
	k.entries[s.UID] = cacheEntry{revision: s.ResourceVersion, pair: pair, err: err}
	return pair, err
}

func parseKeyPair(s *corev1.Secret) (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil, err
	}
	return &pair, nil
}
