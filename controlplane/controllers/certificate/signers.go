package certificate

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Maximum and minimum lifetime of a certificate. The maximum is also the default.
const (
	longestLife  = 365 * 24 * time.Hour
	shortestLife = 10 * time.Minute
)

// signers maps the name of each signer that this controller implements to the check of its
// requests.
var signers = map[string]func(r *x509.CertificateRequest, usages []certificatesv1.KeyUsage) error{
	certificatesv1.KubeAPIServerClientSignerName: func(_ *x509.CertificateRequest,
		usages []certificatesv1.KeyUsage) error {
		return permitUsages(certificatesv1.UsageClientAuth, false, usages)
	},
	certificatesv1.KubeAPIServerClientKubeletSignerName: nodeClient,
	certificatesv1.KubeletServingSignerName:             nodeServing,
}

// Permitted returns an error if the signer with the name signer must not sign request r with the
// given usages. reserved are organizations that no certificate may contain.
func Permitted(signer string, r *x509.CertificateRequest, usages []certificatesv1.KeyUsage, reserved []string) error {
	permits, ok := signers[signer]
	if !ok {
		return fmt.Errorf("%q is not a signer of this cluster", signer)
	}
	for _, o := range r.Subject.Organization {
		if slices.Contains(reserved, o) {
			return fmt.Errorf("subject organization %q is reserved for the cluster itself", o)
		}
	}
	return permits(r, usages)
}

// nodeClient returns an error unless r requests a client certificate with which an agent
// authenticates as its node.
func nodeClient(r *x509.CertificateRequest, usages []certificatesv1.KeyUsage) error {
	if err := nodeSubject(r); err != nil {
		return err
	}
	switch {
	case len(r.DNSNames) > 0:
		return errors.New("DNS subjectAltNames are not allowed")
	case len(r.IPAddresses) > 0:
		return errors.New("IP subjectAltNames are not allowed")
	}
	return firstError(noMailNorURI(r), permitUsages(certificatesv1.UsageClientAuth, true, usages))
}

// nodeServing returns an error unless r requests the certificate of a node's HTTPS server. The
// approver must verify that the names in r belong to the node.
func nodeServing(r *x509.CertificateRequest, usages []certificatesv1.KeyUsage) error {
	if err := nodeSubject(r); err != nil {
		return err
	}
	if len(r.DNSNames)+len(r.IPAddresses) == 0 {
		return errors.New("a DNS or IP subjectAltName is required")
	}
	return firstError(noMailNorURI(r), permitUsages(certificatesv1.UsageServerAuth, true, usages))
}

func nodeSubject(r *x509.CertificateRequest) error {
	switch {
	case !slices.Equal(r.Subject.Organization, []string{api.GroupNodes}):
		return fmt.Errorf("subject organization is not %s", api.GroupNodes)
	case !strings.HasPrefix(r.Subject.CommonName, api.NodeUserPrefix):
		return fmt.Errorf("subject common name does not begin with %s", api.NodeUserPrefix)
	}
	return nil
}

func noMailNorURI(r *x509.CertificateRequest) error {
	switch {
	case len(r.EmailAddresses) > 0:
		return errors.New("email subjectAltNames are not allowed")
	case len(r.URIs) > 0:
		return errors.New("URI subjectAltNames are not allowed")
	}
	return nil
}

// permitUsages returns nil if usages consists of purpose and, optionally, digital signature and key
// encipherment. Otherwise it returns an error. If signs is true, digital signature is required.
func permitUsages(purpose certificatesv1.KeyUsage, signs bool, usages []certificatesv1.KeyUsage) error {
	allowed := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature,
		certificatesv1.UsageKeyEncipherment, purpose}
	for _, u := range usages {
		if !slices.Contains(allowed, u) {
			return fmt.Errorf("usage %q is not allowed with %q", u, purpose)
		}
	}
	required := []certificatesv1.KeyUsage{purpose}
	if signs {
		required = append(required, certificatesv1.UsageDigitalSignature)
	}
	for _, u := range required {
		if !slices.Contains(usages, u) {
			return fmt.Errorf("usage %q is required and missing", u)
		}
	}
	return nil
}

// firstError returns the first error that is not nil.
func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// x509Usages converts the usages of a CertificateSigningRequest to the key usage and the extended
// key usages of an X.509 certificate.
func x509Usages(usages []certificatesv1.KeyUsage) (usage x509.KeyUsage, extended []x509.ExtKeyUsage) {
	for _, u := range usages {
		switch u {
		case certificatesv1.UsageDigitalSignature:
			usage |= x509.KeyUsageDigitalSignature
		case certificatesv1.UsageKeyEncipherment:
			usage |= x509.KeyUsageKeyEncipherment
		case certificatesv1.UsageClientAuth:
			extended = append(extended, x509.ExtKeyUsageClientAuth)
		case certificatesv1.UsageServerAuth:
			extended = append(extended, x509.ExtKeyUsageServerAuth)
		}
	}
	return usage, extended
}

// Life returns the lifetime of a certificate for which the request asks for the given number of
// seconds, limited to the minimum and maximum lifetime. If seconds is nil, it returns the maximum.
func Life(seconds *int32) time.Duration {
	if seconds == nil {
		return longestLife
	}
	return min(max(time.Duration(*seconds)*time.Second, shortestLife), longestLife)
}

// parseRequest parses a PEM certificate request that validation has accepted.
func parseRequest(request []byte) (*x509.CertificateRequest, error) {
	block, _ := pem.Decode(request)
	if block == nil {
		return nil, errors.New("the request is not PEM")
	}
	return x509.ParseCertificateRequest(block.Bytes)
}
