package session

import (
	"crypto/x509"
	"fmt"
	"io"
)

// What a node's certificates are for, as the protocol and the control plane's metrics name it.
const (
	useAgent   = "agent"   // towards replicas
	useServing = "serving" // of the node's HTTPS server
)

// certificate is one that the node shows.
type certificate struct {
	use  string
	leaf *x509.Certificate
}

// certificates are those that the node has now and that the cluster has signed; none before it has an identity.
func (s *Session) certificates() (out []certificate) {
	select {
	case <-s.identified:
		out = append(out, certificate{useAgent, s.id.current().Leaf})
	default:
	}
	if leaf := s.signedServing(); leaf != nil {
		out = append(out, certificate{useServing, leaf})
	}
	return out
}

// WriteMetrics says when the node's certificates end, by the name under which replicas say it of theirs.
func (s *Session) WriteMetrics(w io.Writer) error {
	const name = "keelson_certificate_expiration_timestamp_seconds"
	all := s.certificates()
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
