package pki

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// ReservedOrganizations are those that no certificate gets by asking for it: they let in replicas, and who may do everything.
func ReservedOrganizations() []string { return []string{GroupReplicas, api.GroupMasters} }

// shortLife is from where on the life of a certificate that was asked for includes the time by which it is backdated.
const shortLife = 8 * time.Hour

// SignRequest signs a request that a signer of the cluster has judged. The certificate has the request's key, name,
// organizations and alternative names, and nothing else of it; it is nobody's authority, and ends no later than the CA.
// It is issued at now: IssuedAt and the revocation of nodes go by that.
func (ca *CA) SignRequest(r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration, now time.Time) (certPEM []byte, err error) {
	for _, o := range r.Subject.Organization {
		if slices.Contains(ReservedOrganizations(), o) {
			return nil, fmt.Errorf("%w: the organization %q is the cluster's own", ErrRequest, o)
		}
	}
	until := now.Add(life)
	if life >= shortLife { // of which Backdate is no part that anybody would miss
		until = until.Add(-Backdate)
	}
	if until.After(ca.Cert.NotAfter) {
		until = ca.Cert.NotAfter
	}
	if !until.After(now) {
		return nil, fmt.Errorf("pki: signing the certificate of %s: the CA's own ended at %s", r.Subject.CommonName, ca.Cert.NotAfter)
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial(),
		Subject:      pkix.Name{CommonName: r.Subject.CommonName, Organization: r.Subject.Organization},
		DNSNames:     r.DNSNames, IPAddresses: r.IPAddresses, EmailAddresses: r.EmailAddresses, URIs: r.URIs,
		NotBefore: now.Add(-Backdate), NotAfter: until,
		KeyUsage: usage, ExtKeyUsage: extended,
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.Cert, r.PublicKey, ca.key)
	if err != nil {
		return nil, fmt.Errorf("pki: signing the certificate of %s: %w", r.Subject.CommonName, err)
	}
	return EncodeCert(der), nil
}

// Renew signs a certificate in the place of one that was verified, which says the same and lives as long, for the key of a
// request. What else the request asks for counts for nothing.
func (ca *CA) Renew(request []byte, leaf *x509.Certificate, now time.Time) (certPEM []byte, err error) {
	csr, err := parseRequest(request)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	p := Client(leaf.Subject.CommonName, leaf.Subject.Organization...)
	p.Life = min(leaf.NotAfter.Sub(IssuedAt(leaf)), DefaultLife)
	der, err := ca.sign(p, csr.PublicKey, now)
	if err != nil {
		return nil, err
	}
	return EncodeCert(der), nil
}
