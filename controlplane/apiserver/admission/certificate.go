package admission

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// certificateRequester writes into a request for a certificate who asks, which signers go by, and when its conditions
// were set.
func certificateRequester(clock func() time.Time) func(context.Context, *Attempt) error {
	return func(_ context.Context, a *Attempt) error {
		if _, ok := a.Whole.(*certificatesv1.CertificateSigningRequest); !ok {
			return nil
		}
		switch {
		case a.Creates():
			a.Derive(func(whole api.Object) { requestedBy(&whole.(*certificatesv1.CertificateSigningRequest).Spec, a.User) })
		case a.Facet == "approval" || a.Facet == "status":
			old, _ := a.Stored.(*certificatesv1.CertificateSigningRequest)
			now := metav1.NewTime(clock().UTC().Truncate(time.Second))
			a.Derive(func(whole api.Object) { conditionTimes(whole.(*certificatesv1.CertificateSigningRequest), old, now) })
		}
		return nil
	}
}

func requestedBy(s *certificatesv1.CertificateSigningRequestSpec, u api.User) {
	s.Username, s.UID, s.Groups, s.Extra = u.Name, u.UID, slices.Clone(u.Groups), nil
	for k, v := range u.Extra {
		if s.Extra == nil {
			s.Extra = map[string]certificatesv1.ExtraValue{}
		}
		s.Extra[k] = slices.Clone(v)
	}
}

// conditionTimes fills the times that conditions lack: one that is as it was keeps the time of its transition.
func conditionTimes(c, old *certificatesv1.CertificateSigningRequest, now metav1.Time) {
	for i := range c.Status.Conditions {
		n := &c.Status.Conditions[i]
		if n.LastUpdateTime.IsZero() {
			n.LastUpdateTime = now
		}
		if !n.LastTransitionTime.IsZero() {
			continue
		}
		n.LastTransitionTime = now
		if old == nil {
			continue
		}
		for _, was := range old.Status.Conditions {
			if was.Type == n.Type && was.Status == n.Status && !was.LastTransitionTime.IsZero() {
				n.LastTransitionTime = was.LastTransitionTime
				break
			}
		}
	}
}

// signerRights asks, besides the right to write the object, for a right on the signer by whom or for whom it is written:
// to approve or to sign requests, to attest to a bundle of trust.
func signerRights(c Config) func(context.Context, *Attempt) error {
	return func(ctx context.Context, a *Attempt) error {
		verb, signer, words := signerRight(a)
		if verb == "" {
			return nil
		}
		domain, _, _ := strings.Cut(signer, "/")
		if c.Signer(ctx, a.User, verb, signer) || c.Signer(ctx, a.User, verb, domain+"/*") {
			return nil
		}
		return forbid(a, a.Whole, fmt.Errorf("user not permitted to %s signerName %q", words, signer))
	}
}

// signerRight is the verb on signers that an attempt takes; "" when it takes none.
func signerRight(a *Attempt) (verb, signer, words string) {
	switch o := a.Whole.(type) {
	case *certificatesv1.CertificateSigningRequest:
		old, ok := a.Stored.(*certificatesv1.CertificateSigningRequest)
		switch {
		case !ok:
		case a.Facet == "approval":
			return "approve", old.Spec.SignerName, "approve requests with"
		case a.Facet == "status" && !equal(o.Status, old.Status):
			return "sign", old.Spec.SignerName, "sign requests with"
		}
	case *certificatesv1.ClusterTrustBundle:
		old, _ := a.Stored.(*certificatesv1.ClusterTrustBundle)
		if o.Spec.SignerName == "" || old != nil && equal(o.Spec, old.Spec) {
			return "", "", ""
		}
		return "attest", o.Spec.SignerName, "attest for"
	}
	return "", "", ""
}

// certificateSubject keeps the group that may do everything out of certificates for clients.
func certificateSubject(_ context.Context, a *Attempt) error {
	c, ok := a.Whole.(*certificatesv1.CertificateSigningRequest)
	if !ok || !a.Creates() || c.Spec.SignerName != certificatesv1.KubeAPIServerClientSignerName {
		return nil
	}
	groups, err := requestedGroups(c.Spec.Request)
	if err != nil {
		return forbid(a, c, fmt.Errorf("failed to parse CSR: %w", err))
	}
	if slices.Contains(groups, api.GroupMasters) {
		return forbid(a, c, fmt.Errorf("use of %s signer with %s group is not allowed", c.Spec.SignerName, api.GroupMasters))
	}
	return nil
}
