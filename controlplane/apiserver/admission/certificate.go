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

// certificateRequester returns a plugin that sets the requester in new CertificateSigningRequests,
// which signers rely on. On updates it fills in the times of conditions.
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

// conditionTimes sets missing times of conditions. A condition with unchanged status keeps its
// transition time.
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

// signerRights returns a plugin that requires a permission on the signer, in addition to the
// permission on the object. The verb is approve, sign or attest (for ClusterTrustBundles).
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

// signerRight returns the verb on the signer that an attempt requires; "" if it requires none.
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

// certificateSubject rejects client certificate requests for the group system:masters.
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
