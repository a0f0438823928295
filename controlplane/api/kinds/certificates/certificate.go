// Package certificates describes the kinds of the API group certificates.k8s.io.
package certificates

import (
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// CertificateSigningRequestKind returns the definition of the kind CertificateSigningRequest. The
// request is immutable, and the server sets the requester. Conditions and certificate are set
// through subresources: "approval" by approvers, "status" by signers.
func CertificateSigningRequestKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: certificatesv1.SchemeGroupVersion, Kind: "CertificateSigningRequest",
		Plural:   "certificatesigningrequests",
		Singular: "certificatesigningrequest", Short: []string{"csr"}, ClusterScoped: true, Rule: builder.PathSegment,
	}, func(l *certificatesv1.CertificateSigningRequestList) *[]certificatesv1.CertificateSigningRequest {
		return &l.Items
	})
	builder.SeparateStatus(k,
		func(o *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequestStatus {
			return &o.Status
		}, builder.Accessors[*certificatesv1.CertificateSigningRequest]{
			Spec:     func(c *certificatesv1.CertificateSigningRequest) any { return c.Spec },
			CopySpec: func(obj, old *certificatesv1.CertificateSigningRequest) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *certificatesv1.CertificateSigningRequest) {
				obj.Status = certificatesv1.CertificateSigningRequestStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.PrepareCreate(k, func(c *certificatesv1.CertificateSigningRequest) { c.Generation = 0 })
	builder.PrepareUpdate(k, func(obj, old *certificatesv1.CertificateSigningRequest) {
		obj.Spec = *old.Spec.DeepCopy()
	})
	builder.AddValidation(k, func(c *certificatesv1.CertificateSigningRequest) field.ErrorList {
		return validateCSR(&c.Spec, field.NewPath("spec"))
	})
	// Approvers cannot write the certificate, and signers cannot write the decision.
	addCSRSubresource(k, "approval", func(s, old *certificatesv1.CertificateSigningRequestStatus) {
		s.Certificate = append([]byte(nil), old.Certificate...)
	})
	addCSRSubresource(k, "status", func(s, old *certificatesv1.CertificateSigningRequestStatus) {
		keepDecision(s.Conditions, old.Conditions, certificatesv1.CertificateApproved)
		keepDecision(s.Conditions, old.Conditions, certificatesv1.CertificateDenied)
	})
	builder.AddSubresourceValidation(k, "status",
		func(obj, old *certificatesv1.CertificateSigningRequest) field.ErrorList {
			return validateCSRStatus(&obj.Status, &old.Status, false)
		})
	builder.AddSubresourceValidation(k, "approval",
		func(obj, old *certificatesv1.CertificateSigningRequest) field.ErrorList {
			return validateCSRStatus(&obj.Status, &old.Status, true)
		})
	k.Lists.Fields = builder.Fields(func(c *certificatesv1.CertificateSigningRequest) fields.Set {
		return fields.Set{"spec.signerName": c.Spec.SignerName}
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.AgeColumn, builder.StringColumn("SignerName"),
		builder.StringColumn("Requestor"), builder.StringColumn("RequestedDuration"), builder.StringColumn("Condition"))
	k.Lists.Row = builder.Row(func(c *certificatesv1.CertificateSigningRequest, now time.Time) []any {
		requested := builder.None
		if s := c.Spec.ExpirationSeconds; s != nil {
			requested = duration.HumanDuration(time.Duration(*s) * time.Second)
		}
		return []any{c.Name, builder.Age(c, now), builder.ValueOrNone(c.Spec.SignerName), c.Spec.Username, requested,
			csrState(&c.Status)}
	})
	return k
}

// addCSRSubresource adds a subresource that works like "status". restore copies those parts of the
// old status that the subresource must not change.
func addCSRSubresource(k *api.Kind, name string, restore func(s, old *certificatesv1.CertificateSigningRequestStatus)) {
	facet := *k.Subresources["status"]
	before := facet.PrepareUpdate
	facet.PrepareUpdate = func(obj, old api.Object) {
		before(obj, old)
		updated, previous := obj.(*certificatesv1.CertificateSigningRequest),
			old.(*certificatesv1.CertificateSigningRequest)
		restore(&updated.Status, &previous.Status)
	}
	builder.AddSubresource(k, name, &facet)
}

// csrState returns the text in the column CONDITION of a request.
func csrState(status *certificatesv1.CertificateSigningRequestStatus) string {
	has := map[certificatesv1.RequestConditionType]bool{}
	for _, c := range status.Conditions {
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
	if len(status.Certificate) > 0 {
		state += ",Issued"
	}
	return state
}

// ClusterTrustBundleKind returns the definition of the kind ClusterTrustBundle.
func ClusterTrustBundleKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: certificatesv1.SchemeGroupVersion, Kind: "ClusterTrustBundle", Conditional: true,
		Plural:   "clustertrustbundles",
		Singular: "clustertrustbundle", ClusterScoped: true, Rule: builder.PathSegment,
	}, func(l *certificatesv1.ClusterTrustBundleList) *[]certificatesv1.ClusterTrustBundle { return &l.Items })
	builder.AddValidation(k, func(b *certificatesv1.ClusterTrustBundle) field.ErrorList {
		errs := fieldrules.InvalidErrors(field.NewPath("metadata", "name"), b.Name,
			validateTrustBundleName(b.Spec.SignerName, b.Name))
		if b.Spec.SignerName != "" {
			errs = append(errs, validateSignerName(b.Spec.SignerName, field.NewPath("spec", "signerName"))...)
		}
		return errs
	})
	trust := field.NewPath("spec", "trustBundle")
	k.Validation.Create = builder.CreateValidation(func(b *certificatesv1.ClusterTrustBundle) field.ErrorList {
		return validateTrustBundle(b.Spec.TrustBundle, trust)
	})
	builder.AddUpdateValidation(k, func(obj, old *certificatesv1.ClusterTrustBundle) field.ErrorList {
		errs := fieldrules.ValidateUnchanged(obj.Spec.SignerName, old.Spec.SignerName,
			field.NewPath("spec", "signerName"))
		if obj.Spec.TrustBundle != old.Spec.TrustBundle {
			errs = append(errs, validateTrustBundle(obj.Spec.TrustBundle, trust)...)
		}
		return errs
	})
	k.Lists.Fields = builder.Fields(func(b *certificatesv1.ClusterTrustBundle) fields.Set {
		return fields.Set{"spec.signerName": b.Spec.SignerName}
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("SignerName"))
	k.Lists.Row = builder.Row(func(b *certificatesv1.ClusterTrustBundle, _ time.Time) []any {
		return []any{b.Name, builder.ValueOrNone(b.Spec.SignerName)}
	})
	return k
}
