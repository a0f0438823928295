package session

import (
	"crypto/x509"
	"fmt"
	"io"
)

// Values of nodeCertificate.use. The protocol and the control plane's metrics use the same names.
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
func (n *nodeCredentials) signedCertificates() (out []nodeCertificate) {
	select {
	case <-n.identified:
		out = append(out, nodeCertificate{useAgent, n.id.currentCertificate().Leaf})
	default:
	}
	if leaf := n.signedServingCertificate(); leaf != nil {
		out = append(out, nodeCertificate{useServing, leaf})
	}
	return out
}

// WriteMetrics writes the expiry time of each of the node's certificates as Prometheus metrics.
// Replicas export their own certificates under the same metric name.
func (s *Session) WriteMetrics(w io.Writer) error { return s.creds.writeMetrics(w) }

func (n *nodeCredentials) writeMetrics(w io.Writer) error {
	const name = "keelson_certificate_expiration_timestamp_seconds"
	all := n.signedCertificates()
	if len(all) == 0 {
		return nil
	}
	text := fmt.Appendf(nil, "# HELP %[1]s When a certificate of this node ends, in seconds since 1970.\n# TYPE "+
		"%[1]s gauge\n", name)
	for _, c := range all {
		text = fmt.Appendf(text, "%s{key=%q,kind=\"certificate\",use=%q} %d\n", name, authorityID(c.leaf), c.use,
			c.leaf.NotAfter.Unix())
	}
	_, err := w.Write(text)
	return err
}
