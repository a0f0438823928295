package kinds

import (
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// certificateSigningRequestKind: what a request asks for never changes, and who asks is written by the server. Its
// conditions and its certificate are set through its facets: approval by who approves, status by who signs.
func certificateSigningRequestKind() *api.Kind {
	k := newKind(names{
		gv: certificatesv1.SchemeGroupVersion, kind: "CertificateSigningRequest", plural: "certificatesigningrequests",
		singular: "certificatesigningrequest", short: []string{"csr"}, global: true, rule: pathSegment,
	}, func(l *certificatesv1.CertificateSigningRequestList) *[]certificatesv1.CertificateSigningRequest {
		return &l.Items
	})
	hasStatus(k, func(o *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequestStatus {
		return &o.Status
	}, halves[*certificatesv1.CertificateSigningRequest]{
		spec: func(c *certificatesv1.CertificateSigningRequest) any { return c.Spec },
		keep: func(obj, old *certificatesv1.CertificateSigningRequest) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *certificatesv1.CertificateSigningRequest) {
			obj.Status = certificatesv1.CertificateSigningRequestStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	prepare(k, func(c *certificatesv1.CertificateSigningRequest) { c.Generation = 0 })
	prepareUpdate(k, func(obj, old *certificatesv1.CertificateSigningRequest) { obj.Spec = *old.Spec.DeepCopy() })
	check(k, func(c *certificatesv1.CertificateSigningRequest) field.ErrorList {
		return validateCSR(&c.Spec, field.NewPath("spec"))
	})
	// Who approves does not write the certificate, who signs not what was approved or denied.
	csrFacet(k, "approval", func(s, old *certificatesv1.CertificateSigningRequestStatus) {
		s.Certificate = append([]byte(nil), old.Certificate...)
	})
	csrFacet(k, "status", func(s, old *certificatesv1.CertificateSigningRequestStatus) {
		keepDecision(s.Conditions, old.Conditions, certificatesv1.CertificateApproved)
		keepDecision(s.Conditions, old.Conditions, certificatesv1.CertificateDenied)
	})
	checkFacet(k, "status", func(obj, old *certificatesv1.CertificateSigningRequest) field.ErrorList {
		return validateCSRStatus(&obj.Status, &old.Status, false)
	})
	checkFacet(k, "approval", func(obj, old *certificatesv1.CertificateSigningRequest) field.ErrorList {
		return validateCSRStatus(&obj.Status, &old.Status, true)
	})
	k.Fields = fieldsOf(func(c *certificatesv1.CertificateSigningRequest) fields.Set {
		return fields.Set{"spec.signerName": c.Spec.SignerName}
	})
	k.Columns = columns(nameCol, ageCol, col("SignerName"), col("Requestor"), col("RequestedDuration"), col("Condition"))
	k.Row = row(func(c *certificatesv1.CertificateSigningRequest, now time.Time) []any {
		requested := none
		if s := c.Spec.ExpirationSeconds; s != nil {
			requested = duration.HumanDuration(time.Duration(*s) * time.Second)
		}
		return []any{c.Name, age(c, now), orNone(c.Spec.SignerName), c.Spec.Username, requested, csrState(&c.Status)}
	})
	return k
}

// csrFacet makes a facet as status is, which keeps a part of the status too.
func csrFacet(k *api.Kind, name string, keep func(s, old *certificatesv1.CertificateSigningRequestStatus)) {
	facet := *k.Subresources["status"]
	before := facet.PrepareUpdate
	facet.PrepareUpdate = func(obj, old api.Object) {
		before(obj, old)
		now, was := obj.(*certificatesv1.CertificateSigningRequest), old.(*certificatesv1.CertificateSigningRequest)
		keep(&now.Status, &was.Status)
	}
	addSub(k, name, &facet)
}

// csrState is where a request stands, in one word or a few.
func csrState(s *certificatesv1.CertificateSigningRequestStatus) string {
	has := map[certificatesv1.RequestConditionType]bool{}
	for _, c := range s.Conditions {
		has[c.Type] = true
	}
	state := "Pending"
	switch {
	case has[certificatesv1.CertificateDenied]:
		state = "Denied"
	case has[certificatesv1.CertificateApproved]:
		state = "Approved"
	}
	if has[certificatesv1.CertificateFailed] {
		state += ",Failed"
	}
	if len(s.Certificate) > 0 {
		state += ",Issued"
	}
	return state
}

func clusterTrustBundleKind() *api.Kind {
	k := newKind(names{
		gv: certificatesv1.SchemeGroupVersion, kind: "ClusterTrustBundle", conditional: true, plural: "clustertrustbundles",
		singular: "clustertrustbundle", global: true, rule: pathSegment,
	}, func(l *certificatesv1.ClusterTrustBundleList) *[]certificatesv1.ClusterTrustBundle { return &l.Items })
	check(k, func(b *certificatesv1.ClusterTrustBundle) field.ErrorList {
		errs := invalid(field.NewPath("metadata", "name"), b.Name, trustBundleName(b.Spec.SignerName, b.Name))
		if b.Spec.SignerName != "" {
			errs = append(errs, validateSignerName(b.Spec.SignerName, field.NewPath("spec", "signerName"))...)
		}
		return errs
	})
	trust := field.NewPath("spec", "trustBundle")
	k.ValidateCreate = onCreate(func(b *certificatesv1.ClusterTrustBundle) field.ErrorList {
		return validateTrustBundle(b.Spec.TrustBundle, trust)
	})
	checkUpdate(k, func(obj, old *certificatesv1.ClusterTrustBundle) field.ErrorList {
		errs := sameOr(obj.Spec.SignerName, old.Spec.SignerName, field.NewPath("spec", "signerName"))
		if obj.Spec.TrustBundle != old.Spec.TrustBundle {
			errs = append(errs, validateTrustBundle(obj.Spec.TrustBundle, trust)...)
		}
		return errs
	})
	k.Fields = fieldsOf(func(b *certificatesv1.ClusterTrustBundle) fields.Set {
		return fields.Set{"spec.signerName": b.Spec.SignerName}
	})
	k.Columns = columns(nameCol, col("SignerName"))
	k.Row = row(func(b *certificatesv1.ClusterTrustBundle, _ time.Time) []any {
		return []any{b.Name, orNone(b.Spec.SignerName)}
	})
	return k
}
