package gateway

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/ingressproxy/pairs"
)

// Certificates are the key pairs of a Gateway's listeners as the files that its proxy is given (pairs.Files). Pairs to
// which the Gateway may not refer are not among them.
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
			certificate, key := pairs.Files(namespace, string(ref.Name))
			out[certificate], out[key] = s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]
		}
	}
	return out
}
