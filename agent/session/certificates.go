package session

import (
	"crypto/x509"
	"fmt"
	"io"
)

// Uses of a node's certificates, as named in the protocol and in the control plane's metrics.
const (
	useAgent   = "agent"   // client certificate for connections to replicas
	useServing = "serving" // certificate of the node's HTTPS server
)

// nodeCertificate is a certificate of this node with its use: useAgent or useServing.
type nodeCertificate struct {
	use  string
	leaf *x509.Certificate
}

// signedCertificates returns the node's certificates that the cluster's CA signed. The result is
// empty before the node has an identity.
func (s *Session) signedCertificates() (out []nodeCertificate) {
	select {
	case <-s.identified:
		out = append(out, nodeCertificate{useAgent, s.id.currentCertificate().Leaf})
	default:
	}
	if leaf := s.signedServingCertificate(); leaf != nil {
		out = append(out, nodeCertificate{useServing, leaf})
	}
	return out
}

// WriteMetrics writes the expiry time of each of the node's certificates as Prometheus metrics.
// Replicas export their own certificates under the same metric name.
func (s *Session) WriteMetrics(w io.Writer) error {
	const name = "keelson_certificate_expiration_timestamp_seconds"
	all := s.signedCertificates()
	if len(all) == 0 {
		return nil
	}
	text := fmt.Appendf(nil, "# HELP %[1]s When a certificate of this node ends, in seconds since 1970.\n# TYPE %[1]s gauge\n", name)
	for _, c := range all {
		text = fmt.Appendf(text, "%s{key=%q,kind=\"certificate\",use=%q} %d\n", name, authorityID(c.leaf), c.use, c.leaf.NotAfter.Unix())
	}
	_, err := w.Write(text)
	return err
}
