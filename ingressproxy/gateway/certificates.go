package gateway

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/ingressproxy/pairs"
)

// Certificates returns the TLS key pairs of the listeners of Gateway g as files for its proxy, by
// file name (see pairs.FileNames). It omits key pairs to which the Gateway must not refer.
func Certificates(w *World, g *Gateway) map[string][]byte {
	out := map[string][]byte{}
	for _, l := range g.Listeners {
		if !l.Served() || l.spec.TLS == nil {
			continue
		}
		for _, ref := range l.spec.TLS.CertificateRefs {
			if _, p := w.resolveCertificateRef(g.Object.Namespace, ref); p != nil {
				continue
			}
			namespace := stringOr(ref.Namespace, g.Object.Namespace)
			s := w.Secret(namespace, string(ref.Name))
			certificate, key := pairs.FileNames(namespace, string(ref.Name))
			out[certificate], out[key] = s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]
		}
	}
	return out
}
