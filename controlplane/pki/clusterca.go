package pki

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Files in the folder of a replica's keys and CAs. They exist only during a rotation of the cluster
// CA.
const (
	FileCATrusted = "ca-trusted.pem" // certificates of CAs that are trusted in addition to the CA in ca.crt
	// certificate and key of the previous CA, which signs only API server certificates
	FileCAFormer = "ca-former.pem"
	// FileCANext contains the certificate and key of the new CA while the files ca.crt and ca.key
	// are replaced one after the other.
	FileCANext = "ca-next.pem"
)

// ClusterCA contains the cluster CA of a replica and the other CAs that are trusted during a
// rotation. It reads them from the folder of the replica's keys and CAs. Reload reads the folder
// again, even while connections use the CAs. ClusterCA is safe for concurrent use.
type ClusterCA struct {
	dir string
	now func() time.Time

	mu      sync.Mutex
	current *clusterTrust // guarded by mu; replaced, never modified
	changed chan struct{} // guarded by mu; closed and replaced with current
	since   int64         // guarded by mu; the highest counter that was passed to Reload
}

// clusterTrust contains the CAs that a ClusterCA has read at one time. It is immutable.
type clusterTrust struct {
	signing, serving *CA
	all              []*x509.Certificate // all trusted CA certificates; the first is the certificate of serving
	pool             *x509.CertPool
	pem              []byte
	since            int64
}

// NewClusterCA returns the ClusterCA with the CAs in the folder dir.
func NewClusterCA(dir string, now func() time.Time) (*ClusterCA, error) {
	c := &ClusterCA{dir: dir, now: now, changed: make(chan struct{})}
	return c, c.Reload(0)
}

// Reload reads the folder again. since is a counter that all replicas share; it is higher for later
// contents of the folder. ClusterCA stores the highest value. If the folder cannot be read, the
// previous CAs stay in use.
func (c *ClusterCA) Reload(since int64) error {
	t, err := Load(c.dir)
	if err != nil {
		return err
	}
	next := &clusterTrust{signing: t.CA, serving: t.CA}
	if t.CAFormer != nil {
		next.serving = t.CAFormer
	}
	next.pool = x509.NewCertPool()
	for _, cert := range append([]*x509.Certificate{next.serving.Cert, t.CA.Cert}, t.CATrusted...) {
		if !slices.ContainsFunc(next.all, cert.Equal) {
			next.all = append(next.all, cert)
			next.pool.AddCert(cert)
		}
	}
	next.pem = encodeCerts(next.all)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.since = max(c.since, since)
	next.since = c.since
	was := c.current
	if was != nil && was.since == next.since && bytes.Equal(was.pem, next.pem) &&
		was.signing.Cert.Equal(next.signing.Cert) &&
		was.serving.Cert.Equal(next.serving.Cert) {
		return nil
	}
	if was != nil && was.pool.Equal(next.pool) {
		next.pool = was.pool // Connections that this pool has verified are not verified again.
	}
	c.current = next
	close(c.changed)
	c.changed = make(chan struct{})
	return nil
}

func (c *ClusterCA) currentTrust() *clusterTrust {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current
}

// Changed returns a channel that is closed when the trusted CAs or the signing CA change after the
// call.
func (c *ClusterCA) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// SigningCA returns the CA that signs all certificates except those of the API server.
func (c *ClusterCA) SigningCA() *CA { return c.currentTrust().signing }

// ServingCA returns the CA that signs the API server's certificates. During a rotation, the
// previous CA signs them until all clients trust the new CA.
func (c *ClusterCA) ServingCA() *CA { return c.currentTrust().serving }

// TrustedCerts returns the certificates of all trusted CAs, without duplicates. The first is the
// certificate of ServingCA.
func (c *ClusterCA) TrustedCerts() []*x509.Certificate { return c.currentTrust().all }

// Pool returns the certificates of TrustedCerts as a pool. It returns the same pointer until the
// certificates change.
func (c *ClusterCA) Pool() *x509.CertPool { return c.currentTrust().pool }

// PEM returns the certificates of TrustedCerts in PEM, for clients to trust.
func (c *ClusterCA) PEM() []byte { return c.currentTrust().pem }

// TrustForNodes returns which CAs nodes must trust. pem contains the trusted CA certificates, signs
// is the ID of the signing CA, and since is the counter of Reload. By the counter, nodes detect and
// ignore older results.
func (c *ClusterCA) TrustForNodes() (pem []byte, signs string, since int64) {
	t := c.currentTrust()
	return t.pem, CAID(t.signing.Cert), t.since
}

// PreviousCAs returns the IDs of the trusted CAs that a rotation replaces: all except the signing
// CA and the CA with the ID next, which will become the signing CA.
func (c *ClusterCA) PreviousCAs(next string) (ids []string) {
	t := c.currentTrust()
	for _, cert := range t.all {
		if id := CAID(cert); id != CAID(t.signing.Cert) && id != next {
			ids = append(ids, id)
		}
	}
	return ids
}

// Rotator returns a Rotator for certificates with the profile p. They are issued by the CA that is
// the SigningCA at that time. When the SigningCA changes, they are replaced.
func (c *ClusterCA) Rotator(p Profile) *Rotator { return c.newRotator(p, c.SigningCA) }

// ServingRotator is like Rotator, but the ServingCA issues the certificates.
func (c *ClusterCA) ServingRotator(p Profile) *Rotator { return c.newRotator(p, c.ServingCA) }

func (c *ClusterCA) newRotator(p Profile, issuer func() *CA) *Rotator {
	r := NewRotator(func(now time.Time) (*tls.Certificate, error) {
		issued, err := issuer().Issue(p, now)
		if err != nil {
			return nil, err
		}
		return &issued.TLS, nil
	}, c.now)
	r.stale = func(leaf *x509.Certificate) bool { return !IssuedBy(leaf, issuer().Cert) }
	return r
}

// IssuedBy reports whether ca, and not another trusted CA, issued the certificate leaf. The caller
// has verified that a trusted CA issued it.
func IssuedBy(leaf, ca *x509.Certificate) bool {
	if len(leaf.AuthorityKeyId) == 0 || len(ca.SubjectKeyId) == 0 {
		return leaf.CheckSignatureFrom(ca) == nil
	}
	return bytes.Equal(leaf.AuthorityKeyId, ca.SubjectKeyId)
}

// IssuerID returns the ID of the trusted CA that issued the certificate leaf. It returns "" if no
// trusted CA issued it.
func (c *ClusterCA) IssuerID(leaf *x509.Certificate) string {
	for _, ca := range c.currentTrust().all {
		if IssuedBy(leaf, ca) {
			return CAID(ca)
		}
	}
	return ""
}

// VerifyClient returns an error unless leaf is a client certificate of a trusted CA that is
// currently valid.
func (c *ClusterCA) VerifyClient(leaf *x509.Certificate) error {
	_, err := leaf.Verify(x509.VerifyOptions{Roots: c.Pool(), CurrentTime: c.now(),
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err
}

// SignAgent signs a certificate request of a node's agent with the signing CA (CA.SignAgent).
func (c *ClusterCA) SignAgent(request []byte, node string, life time.Duration, now time.Time) ([]byte, error) {
	return c.SigningCA().SignAgent(request, node, life, now)
}

// SignServing signs a certificate request for a node's HTTPS server with the signing CA
// (CA.SignServing).
func (c *ClusterCA) SignServing(request []byte, node string, address netip.Addr, life time.Duration, now time.Time) (
	[]byte, error,
) {
	return c.SigningCA().SignServing(request, node, address, life, now)
}

// SignRequest signs an approved certificate request with the signing CA (CA.SignRequest).
func (c *ClusterCA) SignRequest(
	r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration, now time.Time,
) ([]byte, error) {
	return c.SigningCA().SignRequest(r, usage, extended, life, now)
}

// hintDomain is the suffix of the TLS server names that CAHint returns.
const hintDomain = ".ca.keelson.internal"

// CAHint returns the TLS server name that a joining machine uses: it requests a server certificate
// from the CA that has the hash in the join token. During a CA rotation, some join tokens contain
// the hash of the previous CA, and others that of the new CA.
func CAHint(hash string) string { return hash[:min(len(hash), 32)] + hintDomain }

// EnrollmentTLS returns the TLS server configuration of the port for nodes and joining machines.
// Client certificates are optional, and are verified with the CAs that are trusted at the time of
// the handshake. The server also presents its CA certificate, because a joining machine has only
// the CA's hash. If the client's server name is the CAHint of the ServingCA, the server presents a
// certificate of that CA, otherwise of the SigningCA.
func (c *ClusterCA) EnrollmentTLS(p Profile) *tls.Config {
	signs, serves := c.Rotator(p), c.ServingRotator(p)
	certificate := func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		by, rotator := c.SigningCA(), signs
		if hash, ok := strings.CutSuffix(h.ServerName, hintDomain); ok && hash != "" {
			if former := c.ServingCA(); strings.HasPrefix(former.Hash(), hash) {
				by, rotator = former, serves
			}
		}
		leaf, err := rotator.Certificate()
		if err != nil {
			return nil, err
		}
		chain := *leaf
		chain.Certificate = append([][]byte{leaf.Certificate[0]}, by.Cert.Raw)
		return &chain, nil
	}
	base := &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: certificate,
		ClientAuth: tls.VerifyClientCertIfGiven,
		// no resumption: each handshake uses the currently trusted CAs
		Time: c.now, NextProtos: []string{"h2"}, SessionTicketsDisabled: true}
	base.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := base.Clone()
		now.GetConfigForClient, now.ClientCAs = nil, c.Pool()
		return now, nil
	}
	return base
}

// Server returns the TLS server configuration of the API server, which presents the certificate of
// rotator. It requests client certificates and does not verify them; the API server does.
func (c *ClusterCA) Server(rotator *Rotator) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: rotator.GetCertificate,
		ClientAuth: tls.RequestClientCert, Time: c.now}
}

// CAID returns the ID of a CA, as 'kctl cluster certs' prints it.
func CAID(c *x509.Certificate) string { return SPKIHash(c)[:16] }

// NewClusterKey creates a new cluster CA for a rotation. It returns the CA's certificate and key in
// PEM, and the CA's ID. The subject differs from that of other CAs, because some clients identify
// CAs by the subject alone.
func NewClusterKey(clusterName string, now time.Time) (text []byte, id string, err error) {
	ca, err := newCA(pkix.Name{CommonName: caNamePrefix + clusterName,
		SerialNumber: now.UTC().Format("20060102-150405")}, clusterName, now)
	if err != nil {
		return nil, "", err
	}
	text, err = ca.encodeCertAndKey()
	return text, CAID(ca.Cert), err
}

// AddTrustedCA adds a cluster CA to the trusted CAs in the folder dir. text contains the CA's
// certificate and key, as returned by NewClusterKey.
func AddTrustedCA(dir string, text []byte) error {
	t, ca, err := loadTrustAndCA(dir, text)
	if err != nil {
		return err
	}
	// A CA of their own now signs for connections between replicas. It is rotated separately.
	if t.PeerCA == nil {
		own, err := t.CA.encodeCertAndKey()
		if err != nil {
			return err
		}
		if err := WriteFile(filepath.Join(dir, FilePeers), own); err != nil {
			return err
		}
	}
	if t.CA.Cert.Equal(ca.Cert) || slices.ContainsFunc(t.CATrusted, ca.Cert.Equal) {
		return nil
	}
	return t.writeTrustedCAs(dir, append(t.CATrusted, ca.Cert))
}

// SetSigningCA makes a cluster CA the signing CA in the folder dir. text contains the CA's
// certificate and key. The previous CA remains trusted, and signs API server certificates until
// FinishServingCA is called.
func SetSigningCA(dir string, text []byte) error {
	t, ca, err := loadTrustAndCA(dir, text)
	if err != nil {
		return err
	}
	if !t.CA.Cert.Equal(ca.Cert) {
		if err := AddTrustedCA(dir, text); err != nil {
			return err
		}
		former, err := t.CA.encodeCertAndKey()
		if err != nil {
			return err
		}
		// These files are written first, so that the previous CA is trusted at all times.
		if err := t.writeTrustedCAs(dir, append(t.CATrusted, t.CA.Cert, ca.Cert)); err != nil {
			return err
		}
		if err := WriteFile(filepath.Join(dir, FileCAFormer), former); err != nil {
			return err
		}
		if err := WriteFile(filepath.Join(dir, FileCANext), text); err != nil {
			return err
		}
	}
	return finishCA(dir, ca)
}

// finishCA writes the certificate and key of ca to FileCACert and FileCAKey, and removes
// FileCANext.
func finishCA(dir string, ca *CA) error {
	key, err := encodeKey(ca.key)
	if err != nil {
		return err
	}
	if err := WriteFile(filepath.Join(dir, FileCACert), ca.PEM()); err != nil {
		return err
	}
	if err := WriteFile(filepath.Join(dir, FileCAKey), key); err != nil {
		return err
	}
	return writeOrRemove(filepath.Join(dir, FileCANext), nil)
}

// FinishServingCA ends the use of the previous CA in the folder dir: it deletes the key, so that
// the signing CA also signs API server certificates.
func FinishServingCA(dir string) error { return writeOrRemove(filepath.Join(dir, FileCAFormer), nil) }

// RemoveTrustedCA removes the CA with the given ID from the trusted CAs in the folder dir. It
// returns an error for the signing CA.
func RemoveTrustedCA(dir, id string) error {
	t, err := Load(dir)
	if err != nil {
		return err
	}
	if CAID(t.CA.Cert) == id {
		return fmt.Errorf("pki: CA %s is the signing CA and cannot be removed", id)
	}
	if t.CAFormer != nil && CAID(t.CAFormer.Cert) == id {
		if err := FinishServingCA(dir); err != nil {
			return err
		}
	}
	left := slices.DeleteFunc(slices.Clone(t.CATrusted), func(c *x509.Certificate) bool {
		return CAID(c) == id || c.Equal(t.CA.Cert)
	})
	if len(left) == len(t.CATrusted) {
		return nil
	}
	return writeOrRemove(filepath.Join(dir, FileCATrusted), encodeCerts(left))
}

func (t *Trust) writeTrustedCAs(dir string, list []*x509.Certificate) error {
	return WriteFile(filepath.Join(dir, FileCATrusted), encodeCerts(list))
}
