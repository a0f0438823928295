package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

const (
	caNamePrefix = "keelson-ca@"
	caLife       = 10 * 365 * 24 * time.Hour

	// DefaultLife is the default lifetime of a certificate. A Rotator renews the certificate when
	// two thirds of the lifetime have passed.
	DefaultLife = 365 * 24 * time.Hour
	// Backdate is how long before its issue time a certificate becomes valid. The clocks of
	// machines differ, and a new certificate must be valid on all machines immediately.
	Backdate = 5 * time.Minute

	// GroupReplicas is the organization in the certificates with which replicas authenticate to
	// each other (peer certificates).
	GroupReplicas = "keelson:replicas"
	// PeerServerName is a DNS name in every peer certificate. Replicas verify this name and
	// GroupReplicas. They do not verify the peer's address, because it may change.
	PeerServerName = "replica.keelson.internal"
)

// CA is a certificate authority: a CA certificate and its private key. It is immutable and safe for
// concurrent use.
type CA struct {
	Cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewCA creates a self-signed CA (ECDSA P-256) that is valid for ten years.
func NewCA(clusterName string, now time.Time) (*CA, error) {
	return newCA(pkix.Name{CommonName: caNamePrefix + clusterName}, clusterName, now)
}

func newCA(subject pkix.Name, clusterName string, now time.Time) (*CA, error) {
	if clusterName == "" {
		return nil, errors.New("pki: creating a CA: the cluster name is empty")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("pki: creating the CA's key: %w", err)
	}
	tmpl := &x509.Certificate{
		SerialNumber:          newSerial(),
		Subject:               subject,
		NotBefore:             now.Add(-Backdate),
		NotAfter:              now.Add(caLife),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("pki: signing the CA's certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("pki: reading the new CA's certificate: %w", err)
	}
	return &CA{Cert: cert, key: key}, nil
}

// PEM returns the CA certificate in PEM, for clients to trust.
func (ca *CA) PEM() []byte { return EncodeCert(ca.Cert.Raw) }

// Pool returns a certificate pool that contains only this CA.
func (ca *CA) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(ca.Cert)
	return p
}

// Hash returns the SHA-256 hash of the CA's public key, in hex. Join tokens contain this hash, by
// which a joining machine verifies that it is connected to the right cluster.
func (ca *CA) Hash() string { return SPKIHash(ca.Cert) }

// SPKIHash returns the SHA-256 hash of the certificate's public key, in hex.
func SPKIHash(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// Profile describes the contents of a certificate that a CA is to issue.
type Profile struct {
	CommonName    string
	Organizations []string
	DNSNames      []string
	IPs           []net.IP
	Server        bool
	Client        bool
	Life          time.Duration // lifetime; 0 means DefaultLife
}

// ReplicaServing returns the profile of the server certificate of a replica's API. The certificate
// contains the names and the cluster IP of Service default/kubernetes, the loopback addresses, the
// replica's name, and its addresses or names in advertise.
func ReplicaServing(replica string, serviceIP net.IP, advertise ...string) Profile {
	p := Profile{CommonName: "keelson-apiserver", Server: true, DNSNames: []string{
		"kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local", "localhost",
	}, IPs: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}}
	if serviceIP != nil {
		p.IPs = append(p.IPs, serviceIP)
	}
	p.addHosts(append([]string{replica}, advertise...)...)
	return p
}

// ReplicaPeer returns the profile of a replica's peer certificate. The replica uses this
// certificate as client and as server in connections between replicas.
func ReplicaPeer(replica string, advertise ...string) Profile {
	p := Profile{
		CommonName: replica, Organizations: []string{GroupReplicas},
		DNSNames: []string{PeerServerName}, Server: true, Client: true,
	}
	p.addHosts(append([]string{replica}, advertise...)...)
	return p
}

// Client returns the profile of a client certificate for a user who is in groups.
func Client(user string, groups ...string) Profile {
	return Profile{CommonName: user, Organizations: groups, Client: true}
}

// Admin returns the profile of the cluster administrator's certificate, with the group
// system:masters.
func Admin() Profile { return Client("keelson-admin", api.GroupMasters) }

func (p *Profile) addHosts(hosts ...string) {
	for _, h := range hosts {
		ip := net.ParseIP(h)
		switch {
		case h == "":
		case ip != nil && !slices.ContainsFunc(p.IPs, ip.Equal):
			p.IPs = append(p.IPs, ip)
		case ip == nil && !slices.Contains(p.DNSNames, h):
			p.DNSNames = append(p.DNSNames, h)
		}
	}
}

// Issued is a certificate with its private key, in PEM and for crypto/tls.
type Issued struct {
	Cert    *x509.Certificate
	CertPEM []byte // the certificate; a server certificate is followed by that of the CA, for clients that pin the CA
	KeyPEM  []byte
	TLS     tls.Certificate
}

// Issue generates a private key and issues a certificate for it. p describes the contents of the
// certificate.
func (ca *CA) Issue(p Profile, now time.Time) (*Issued, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("pki: creating a key for %s: %w", p.CommonName, err)
	}
	der, err := ca.signPublicKey(p, &key.PublicKey, now)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("pki: reading the new certificate of %s: %w", p.CommonName, err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	out := &Issued{Cert: cert, CertPEM: EncodeCert(der), KeyPEM: keyPEM,
		TLS: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: cert}}
	if p.Server {
		out.CertPEM = append(out.CertPEM, ca.PEM()...)
		out.TLS.Certificate = append(out.TLS.Certificate, ca.Cert.Raw)
	}
	return out, nil
}

func (ca *CA) signPublicKey(p Profile, pub any, now time.Time) ([]byte, error) {
	life := p.Life
	if life == 0 {
		life = DefaultLife
	}
	tmpl := &x509.Certificate{
		SerialNumber: newSerial(),
		Subject:      pkix.Name{CommonName: p.CommonName, Organization: p.Organizations},
		DNSNames:     p.DNSNames,
		IPAddresses:  p.IPs,
		NotBefore:    now.Add(-Backdate),
		NotAfter:     now.Add(life),
		KeyUsage:     x509.KeyUsageDigitalSignature,

		BasicConstraintsValid: true,
	}
	if tmpl.NotAfter.After(ca.Cert.NotAfter) {
		tmpl.NotAfter = ca.Cert.NotAfter
	}
	if p.Server {
		tmpl.ExtKeyUsage = append(tmpl.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	if p.Client {
		tmpl.ExtKeyUsage = append(tmpl.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.Cert, pub, ca.key)
	if err != nil {
		return nil, fmt.Errorf("pki: signing the certificate of %s: %w", p.CommonName, err)
	}
	return der, nil
}

// SignAgent signs request, the certificate request (PEM or DER) of a node's agent. The request must
// have exactly the subject CN=system:node:<node>, O=system:nodes, no alternative names, and a
// signature of its own key. Otherwise the error names the violation and wraps ErrRequest. A life of
// 0 means DefaultLife.
func (ca *CA) SignAgent(request []byte, node string, life time.Duration, now time.Time) (certPEM []byte, err error) {
	csr, err := nodeRequest(request, node)
	if err == nil && len(csr.IPAddresses) > 0 {
		err = fmt.Errorf("%w of node %q: it requests %d alternative names, want none", ErrRequest, node,
			len(csr.IPAddresses))
	}
	if err != nil {
		return nil, err
	}
	p := Client(api.NodeUserPrefix+node, api.GroupNodes)
	p.Life = life
	der, err := ca.signPublicKey(p, csr.PublicKey, now)
	if err != nil {
		return nil, err
	}
	return EncodeCert(der), nil
}

// SignServing signs request, the certificate request for a node's HTTPS server. The request must
// have the subject that SignAgent requires. Of the requested IP addresses, the certificate contains
// only address, from which the node connects: with other addresses, the node could impersonate
// another server. For the same reason it contains no host names. It is valid for server
// authentication only.
func (ca *CA) SignServing(request []byte, node string, address netip.Addr, life time.Duration, now time.Time) (
	certPEM []byte, err error,
) {
	csr, err := nodeRequest(request, node)
	if err != nil {
		return nil, err
	}
	p := Profile{CommonName: api.NodeUserPrefix + node, Organizations: []string{api.GroupNodes},
		Server: true, Life: life}
	for _, ip := range csr.IPAddresses {
		if a, ok := netip.AddrFromSlice(ip); ok && a.Unmap() == address.Unmap() && a.Unmap().IsGlobalUnicast() {
			p.IPs = []net.IP{ip}
		}
	}
	der, err := ca.signPublicKey(p, csr.PublicKey, now)
	if err != nil {
		return nil, err
	}
	return EncodeCert(der), nil
}

// nodeRequest parses request, a certificate request of a node (PEM or DER). It returns an error
// that wraps ErrRequest unless the request has the node's subject, and no alternative names except
// IP addresses.
func nodeRequest(request []byte, node string) (*x509.CertificateRequest, error) {
	csr, err := parseRequest(request)
	if err != nil {
		return nil, fmt.Errorf("%w of node %q: %w", ErrRequest, node, err)
	}
	want := api.NodeUserPrefix + node
	extra := len(csr.DNSNames) + len(csr.EmailAddresses) + len(csr.URIs)
	switch {
	case node == "":
		err = errors.New("the node has no name")
	case csr.Subject.CommonName != want:
		err = fmt.Errorf("the common name is %q, want %q", csr.Subject.CommonName, want)
	case len(csr.Subject.Organization) != 1 || csr.Subject.Organization[0] != api.GroupNodes:
		err = fmt.Errorf("the organizations are %q, want only %q", csr.Subject.Organization, api.GroupNodes)
	case extra > 0:
		err = fmt.Errorf("it requests %d alternative names, want none", extra)
	}
	if err != nil {
		return nil, fmt.Errorf("%w of node %q: %w", ErrRequest, node, err)
	}
	return csr, nil
}

// ErrRequest is wrapped by the error for a certificate request that the CA refuses to sign.
var ErrRequest = errors.New("pki: refusing the certificate request")

func parseRequest(data []byte) (*x509.CertificateRequest, error) {
	if block, _ := pem.Decode(data); block != nil {
		if block.Type != pemCSR {
			return nil, fmt.Errorf("PEM block is %q, want %q", block.Type, pemCSR)
		}
		data = block.Bytes
	}
	csr, err := x509.ParseCertificateRequest(data)
	if err != nil {
		return nil, err
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, fmt.Errorf("its signature: %w", err)
	}
	return csr, nil
}

func newSerial() *big.Int {
	b := make([]byte, 16)
	rand.Read(b)
	b[0] &= 0x7f // positive
	b[0] |= 0x40 // fixed length
	return new(big.Int).SetBytes(b)
}
