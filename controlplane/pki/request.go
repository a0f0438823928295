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

// ReservedOrganizations returns the organizations of replicas and administrators. SignRequest
// rejects certificate requests with these organizations.
func ReservedOrganizations() []string { return []string{GroupReplicas, api.GroupMasters} }

// shortLife is the limit below which a requested lifetime is short. A certificate with a shorter
// lifetime is valid for that time after its issue. For other certificates, Backdate is part of the
// lifetime, so they expire earlier by Backdate.
const shortLife = 8 * time.Hour

// SignRequest signs r, a certificate request that has been approved for a cluster signer. The
// certificate contains only the request's key, common name, organizations and alternative names. It
// is not a CA certificate and expires with the CA at the latest. Its issue time (IssuedAt) is now,
// which determines whether a revocation covers it.
func (ca *CA) SignRequest(
	r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration, now time.Time,
) (certPEM []byte, err error) {
	for _, o := range r.Subject.Organization {
		if slices.Contains(ReservedOrganizations(), o) {
			return nil, fmt.Errorf("%w: the organization %q is reserved for the cluster", ErrRequest, o)
		}
	}
	until := now.Add(life)
	if life >= shortLife { // The certificate then expires earlier by Backdate, which is negligible.
		until = until.Add(-Backdate)
	}
	if until.After(ca.Cert.NotAfter) {
		until = ca.Cert.NotAfter
	}
	if !until.After(now) {
		return nil, fmt.Errorf("pki: signing the certificate of %s: the CA's certificate expired at %s",
			r.Subject.CommonName, ca.Cert.NotAfter)
	}
	tmpl := &x509.Certificate{
		SerialNumber: newSerial(),
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

// Renew signs a certificate that replaces leaf, a certificate that the caller has verified. The new
// certificate has the same subject and lifetime as leaf, and the key in request (PEM or DER). The
// other contents of the request are ignored.
func (ca *CA) Renew(request []byte, leaf *x509.Certificate, now time.Time) (certPEM []byte, err error) {
	csr, err := parseRequest(request)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	p := Client(leaf.Subject.CommonName, leaf.Subject.Organization...)
	p.Life = min(leaf.NotAfter.Sub(IssuedAt(leaf)), DefaultLife)
	der, err := ca.signPublicKey(p, csr.PublicKey, now)
	if err != nil {
		return nil, err
	}
	return EncodeCert(der), nil
}
