package certificates

import (
	"bytes"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	// legacySigner is a signer name that v1beta1 allowed and v1 does not.
	legacySigner   = "kubernetes.io/legacy-unknown"
	minCertificate = 600 // minimum lifetime of a certificate, in seconds
	MaxTrustBundle = 1 << 20
	maxRSABits     = 16384
)

var keyUsages = []certificatesv1.KeyUsage{
	certificatesv1.UsageSigning, certificatesv1.UsageDigitalSignature, certificatesv1.UsageContentCommitment,
	certificatesv1.UsageKeyEncipherment, certificatesv1.UsageKeyAgreement, certificatesv1.UsageDataEncipherment,
	certificatesv1.UsageCertSign, certificatesv1.UsageCRLSign, certificatesv1.UsageEncipherOnly,
	certificatesv1.UsageDecipherOnly,
	certificatesv1.UsageAny, certificatesv1.UsageServerAuth, certificatesv1.UsageClientAuth,
	certificatesv1.UsageCodeSigning,
	certificatesv1.UsageEmailProtection, certificatesv1.UsageSMIME, certificatesv1.UsageIPsecEndSystem,
	certificatesv1.UsageIPsecTunnel,
	certificatesv1.UsageIPsecUser, certificatesv1.UsageTimestamping, certificatesv1.UsageOCSPSigning,
	certificatesv1.UsageMicrosoftSGC,
	certificatesv1.UsageNetscapeSGC,
}

func validateCSR(s *certificatesv1.CertificateSigningRequestSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if err := checkRequest(s.Request); err != nil {
		errs = append(errs, field.Invalid(spec.Child("request"), fieldrules.OmittedValue, err.Error()))
	}
	usages := spec.Child("usages")
	if len(s.Usages) == 0 {
		errs = append(errs, field.Required(usages, ""))
	}
	for i, u := range s.Usages {
		if !slices.Contains(keyUsages, u) {
			errs = append(errs, field.NotSupported(usages.Index(i), u, slices.Sorted(slices.Values(keyUsages))))
		}
		if slices.Contains(s.Usages[:i], u) {
			errs = append(errs, field.Duplicate(usages.Index(i), u))
		}
	}
	if s.SignerName == legacySigner {
		errs = append(errs, field.Invalid(spec.Child("signerName"), s.SignerName,
			"the legacy signerName is not allowed via this API version"))
	} else {
		errs = append(errs, validateSignerName(s.SignerName, spec.Child("signerName"))...)
	}
	if e := s.ExpirationSeconds; e != nil && *e < minCertificate {
		errs = append(errs, field.Invalid(spec.Child("expirationSeconds"), *e,
			"may not specify a duration less than 600 seconds (10 minutes)"))
	}
	return errs
}

// checkRequest returns an error if data is not a PKCS#10 request signed with its own key.
func checkRequest(data []byte) error {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return errors.New("PEM block type must be CERTIFICATE REQUEST")
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return err
	}
	// The time that a verification takes grows with the square of the key length, which an
	// untrusted client chooses.
	if k, ok := r.PublicKey.(*rsa.PublicKey); ok && k.N.BitLen() > maxRSABits {
		return fmt.Errorf("the RSA key has %d bits, more than %d", k.N.BitLen(), maxRSABits)
	}
	return r.CheckSignature()
}

// validateSignerName validates a name such as "example.com/signer".
func validateSignerName(name string, fldPath *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	domain, rest, ok := strings.Cut(name, "/")
	if !ok || strings.Contains(rest, "/") {
		return field.ErrorList{field.Invalid(fldPath, name,
			"must be a fully qualified domain and path of the form 'example.com/signer-name'")}
	}
	var errs field.ErrorList
	if len(domain) > validation.DNS1123SubdomainMaxLength {
		errs = append(errs, field.TooLong(fldPath, domain, validation.DNS1123SubdomainMaxLength))
	}
	labels := func(of string, judge func(string) []string) {
		for _, l := range strings.Split(of, ".") {
			if wrong := judge(l); len(wrong) > 0 {
				for _, w := range wrong {
					errs = append(errs, field.Invalid(fldPath, of, fmt.Sprintf("validating label %q: %s", l, w)))
				}
				return
			}
		}
	}
	labels(domain, validation.IsDNS1123Label)
	if !strings.Contains(domain, ".") {
		errs = append(errs, field.Invalid(fldPath, domain,
			"should be a domain with at least two segments separated by dots"))
	}
	labels(rest, validation.IsDNS1123Subdomain)
	// The limit for the path allows a namespace, a dot and a name.
	const longest = 2*validation.DNS1123SubdomainMaxLength + validation.DNS1123LabelMaxLength + 2
	if len(name) > longest {
		errs = append(errs, field.TooLong(fldPath, name, longest))
	}
	return errs
}

// decided are the types of the conditions that decide a request. These conditions can only be True,
// and are never removed.
var decided = []certificatesv1.RequestConditionType{certificatesv1.CertificateApproved,
	certificatesv1.CertificateDenied, certificatesv1.CertificateFailed}

// validateCSRStatus validates the status of a request and its change. viaApproval reports whether
// the change was made through the subresource "approval": only that may approve or deny. Only
// signers may set the certificate, and only once.
func validateCSRStatus(s, old *certificatesv1.CertificateSigningRequestStatus, viaApproval bool) field.ErrorList {
	fldPath := field.NewPath("status", "conditions")
	errs := validateCSRConditions(s.Conditions, fldPath)
	certificate := field.NewPath("status", "certificate")
	if !bytes.Equal(s.Certificate, old.Certificate) {
		if err := checkCertificates(s.Certificate); err != nil {
			errs = append(errs, field.Invalid(certificate, "<certificate data>", err.Error()))
		}
		if len(old.Certificate) > 0 {
			errs = append(errs, field.Forbidden(certificate, "updates may not modify existing certificate content"))
		}
	}
	for _, t := range decided {
		updated, previous := conditionsOfType(s.Conditions, t), conditionsOfType(old.Conditions, t)
		byApprover := t != certificatesv1.CertificateFailed
		switch {
		case len(updated) < len(previous):
			errs = append(errs, field.Forbidden(fldPath,
				fmt.Sprintf("updates may not remove a condition of type %q", t)))
		case viaApproval || !byApprover:
		case len(updated) > len(previous):
			errs = append(errs, field.Forbidden(fldPath, fmt.Sprintf("updates may not add a condition of type %q", t)))
		}
	}
	return errs
}

func validateCSRConditions(
	list []certificatesv1.CertificateSigningRequestCondition, fldPath *field.Path,
) field.ErrorList {
	var errs field.ErrorList
	seen := map[certificatesv1.RequestConditionType]bool{}
	for i, c := range list {
		here := fldPath.Index(i)
		if c.Type == "" {
			errs = append(errs, field.Required(here.Child("type"), ""))
		}
		allowed := []corev1.ConditionStatus{corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown}
		if slices.Contains(decided, c.Type) {
			allowed = []corev1.ConditionStatus{corev1.ConditionTrue}
		}
		if c.Status == "" {
			errs = append(errs, field.Required(here.Child("status"), ""))
		} else {
			errs = append(errs, fieldrules.ValidateSupported(c.Status, here.Child("status"), allowed...)...)
		}
		if seen[c.Type] {
			errs = append(errs, field.Duplicate(here.Child("type"), c.Type))
		}
		seen[c.Type] = true
	}
	if seen[certificatesv1.CertificateApproved] && seen[certificatesv1.CertificateDenied] {
		errs = append(errs, field.Invalid(fldPath, "{Approved, Denied}",
			"Approved and Denied conditions are mutually exclusive"))
	}
	return errs
}

// keepDecision restores the conditions of type t (such as Approved) from the previous conditions,
// because signers may not change them. If the number of such conditions has changed, it does
// nothing, and validation rejects the update.
func keepDecision(
	conditions, previous []certificatesv1.CertificateSigningRequestCondition, t certificatesv1.RequestConditionType,
) {
	old := conditionsOfType(previous, t)
	if len(conditionsOfType(conditions, t)) != len(old) {
		return
	}
	for i := range conditions {
		if conditions[i].Type == t {
			conditions[i], old = old[0], old[1:]
		}
	}
}

func conditionsOfType(
	list []certificatesv1.CertificateSigningRequestCondition, t certificatesv1.RequestConditionType,
) []certificatesv1.CertificateSigningRequestCondition {
	var out []certificatesv1.CertificateSigningRequestCondition
	for _, c := range list {
		if c.Type == t {
			out = append(out, c)
		}
	}
	return out
}

// checkCertificates returns an error if data is not a chain of certificates. An empty chain is
// valid.
func checkCertificates(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	blocks := 0
	for rest := data; ; blocks++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return fmt.Errorf("only CERTIFICATE PEM blocks are allowed, found %q", block.Type)
		}
		if len(block.Headers) > 0 {
			return errors.New("no PEM block headers are permitted")
		}
		certs, err := x509.ParseCertificates(block.Bytes)
		if err != nil {
			return err
		}
		if len(certs) == 0 {
			return errors.New("found CERTIFICATE PEM block containing 0 certificates")
		}
	}
	if blocks == 0 {
		return errors.New("must contain at least one CERTIFICATE PEM block")
	}
	return nil
}

// validateTrustBundleName validates the name of a ClusterTrustBundle. If the bundle has a signer,
// the name must have the signer's name as prefix.
func validateTrustBundleName(signer, name string) []string {
	if signer == "" {
		if strings.Contains(name, ":") {
			return []string{`ClusterTrustBundle without signer name must not have ":" in its name`}
		}
		return apivalidation.NameIsDNSSubdomain(name, false)
	}
	prefix := strings.ReplaceAll(signer, "/", ":") + ":"
	rest, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return []string{fmt.Sprintf("ClusterTrustBundle for signerName %s must be named with prefix %s",
			signer, prefix)}
	}
	return apivalidation.NameIsDNSSubdomain(rest, false)
}

// validateTrustBundle validates the CA certificates in the text of a ClusterTrustBundle.
func validateTrustBundle(text string, fldPath *field.Path) field.ErrorList {
	if len(text) > MaxTrustBundle {
		return field.ErrorList{field.TooLong(fldPath, "", MaxTrustBundle)}
	}
	var errs field.ErrorList
	places := map[string][]int{}
	var order []string
	rest := []byte(text)
	for i := 0; ; i++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if why := whyNoTrustAnchor(block); why != "" {
			errs = append(errs, field.Invalid(fldPath, fieldrules.OmittedValue, fmt.Sprintf("entry %d "+why, i)))
			continue
		}
		if places[string(block.Bytes)] == nil {
			order = append(order, string(block.Bytes))
		}
		places[string(block.Bytes)] = append(places[string(block.Bytes)], i)
	}
	switch {
	case len(errs) > 0:
		return errs
	case len(order) == 0:
		return field.ErrorList{field.Invalid(fldPath, fieldrules.OmittedValue,
			"at least one trust anchor must be provided")}
	}
	for _, cert := range order {
		if len(places[cert]) > 1 {
			errs = append(errs, field.Invalid(fldPath, fieldrules.OmittedValue,
				fmt.Sprintf("duplicate trust anchor (indices %v)", places[cert])))
		}
	}
	return errs
}

// whyNoTrustAnchor returns the reason why a PEM block is not a CA certificate; "" if it is one.
func whyNoTrustAnchor(block *pem.Block) string {
	if block.Type != "CERTIFICATE" {
		return "has bad block type: " + strings.ReplaceAll(block.Type, "%", "%%")
	}
	if len(block.Headers) > 0 {
		return "has PEM block headers"
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	switch {
	case err != nil:
		return "does not parse as X.509"
	case !cert.IsCA:
		return "does not have the CA bit set"
	case !cert.BasicConstraintsValid:
		return "has invalid basic constraints"
	}
	return ""
}
