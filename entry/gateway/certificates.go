package gateway

import (
	"crypto/sha256"
	"encoding/hex"

	corev1 "k8s.io/api/core/v1"
)

// Certificates are the key pairs of a Gateway's listeners as the files that its proxy is given: CertificateFile has the
// names. Pairs to which the Gateway may not refer are not among them.
func Certificates(w *World, g *Gateway) map[string][]byte {
	out := map[string][]byte{}
	for _, l := range g.Listeners {
		if !l.Served() || l.spec.TLS == nil {
			continue
		}
		for _, ref := range l.spec.TLS.CertificateRefs {
			if _, p := w.certificate(g.Object.Namespace, ref); p != nil {
				continue
			}
			namespace := deref(ref.Namespace, g.Object.Namespace)
			s := w.Secret(namespace, string(ref.Name))
			certificate, key := CertificateFiles(namespace, string(ref.Name))
			out[certificate], out[key] = s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]
		}
	}
	return out
}

// CertificateFiles are the names of the files that hold the pair of a Secret. The names of both may be longer than a
// file's.
func CertificateFiles(namespace, name string) (certificate, key string) {
	sum := sha256.Sum256([]byte(namespace + "/" + name))
	at := hex.EncodeToString(sum[:16])
	return at + ".crt", at + ".key"
}
