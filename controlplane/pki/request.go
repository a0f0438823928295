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

// ReservedOrganizations returns the organizations of replicas and administrators, which requested
// certificates must not contain.
func ReservedOrganizations() []string { return []string{GroupReplicas, api.GroupMasters} }

// shortLife is a limit for requested lifetimes: from this lifetime on, the backdating of a
// certificate is part of its lifetime instead of added to it.
const shortLife = 8 * time.Hour

// SignRequest signs a certificate request that a cluster signer has approved. The certificate
// contains only the request's key, common name, organizations and alternative names. It is not a CA
// certificate and expires with the CA at the latest. IssuedAt returns now for it, which determines
// whether a revocation covers it.
func (ca *CA) SignRequest(r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration, now time.Time) (certPEM []byte, err error) {
	for _, o := range r.Subject.Organization {
		if slices.Contains(ReservedOrganizations(), o) {
			return nil, fmt.Errorf("%w: the organization %q is the cluster's own", ErrRequest, o)
		}
	}
	until := now.Add(life)
	if life >= shortLife { // the certificate then expires earlier by Backdate, which is negligible
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

// Renew signs a certificate that replaces the verified certificate leaf, with the same subject and
// lifetime, for the key of a request. The other contents of the request are ignored.
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
