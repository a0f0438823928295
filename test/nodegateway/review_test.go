package nodegateway_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/agent"
)

// reviewRequest responds to reviews as the API server does, and refuses the reviews of clients that
// are not nodes.
func reviewRequest(o runtime.Object, by string) (runtime.Object, bool) {
	if !strings.HasPrefix(by, "system:node:") {
		return nil, false
	}
	switch o := o.(type) {
	case *authenticationv1.TokenReview:
		out := o.DeepCopy()
		if name, ok := strings.CutPrefix(o.Spec.Token, "token-of-"); ok {
			out.Status.Authenticated, out.Status.User = true,
				authenticationv1.UserInfo{Username: name, Groups: []string{"people"},
					Extra: map[string]authenticationv1.ExtraValue{"scopes": {"all"}}}
		}
		return out, true
	case *authorizationv1.SubjectAccessReview:
		out := o.DeepCopy()
		a := o.Spec.ResourceAttributes
		fits := a.Resource == "nodes" && by == "system:node:"+a.Name && a.Verb == "get" && a.Version == "v1"
		out.Status.Allowed = fits &&
			(o.Spec.User == "scraper" && a.Subresource == "metrics" && len(o.Spec.Extra) == 1 ||
				slices.Contains(o.Spec.Groups, "system:masters") && a.Subresource == "proxy")
		return out, true
	}
	return nil, false
}

// Clients of a node are authenticated and authorized by the control plane, as the node and for that
// node: tokens and certificate names, for each subresource. Requests that are not reviews are
// refused.
func TestReview(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", "True")
	for _, c := range []struct {
		name string
		q    agent.AccessReview
		want agent.AccessDecision
	}{
		{"who may", agent.AccessReview{Token: "token-of-scraper", Subresources: []string{"metrics"}},
			agent.AccessDecision{Authenticated: true, User: "scraper", Allowed: true}},
		{"who may not that", agent.AccessReview{Token: "token-of-scraper", Subresources: []string{"pods", "proxy"}},
			agent.AccessDecision{Authenticated: true, User: "scraper"}},
		{"nobody", agent.AccessReview{Token: "made-up", Subresources: []string{"metrics"}}, agent.AccessDecision{}},
		{"a certificate", agent.AccessReview{User: "admin", Groups: []string{"system:masters"},
			Subresources: []string{"pods", "proxy"}},
			agent.AccessDecision{Authenticated: true, User: "admin", Allowed: true}},
	} {
		c.q.Verb = "get"
		got, err := n.ReviewAccess(t.Context(), c.q)
		if err != nil || got != c.want {
			t.Errorf("%s: %+v %v", c.name, got, err)
		}
	}
	for what, q := range map[string]agent.AccessReview{
		"both":              {Token: "a", User: "b", Verb: "get", Subresources: []string{"metrics"}},
		"neither":           {Verb: "get", Subresources: []string{"metrics"}},
		"a verb":            {Token: "a", Verb: "bind", Subresources: []string{"metrics"}},
		"no subresource":    {Token: "a", Verb: "get"},
		"many subresources": {Token: "a", Verb: "get", Subresources: make([]string, 5)},
		"a long token":      {Token: strings.Repeat("a", 64<<10), Verb: "get", Subresources: []string{"metrics"}},
		"many groups":       {User: "a", Groups: make([]string, 1000), Verb: "get", Subresources: []string{"metrics"}},
	} {
		if got, err := n.ReviewAccess(t.Context(), q); err == nil || !errors.Is(err, agent.ErrReviewUnavailable) ||
			got.Allowed || got.Authenticated {
			t.Errorf("%s: %+v %v", what, got, err)
		}
	}
	b.stopReplica("cp1")
	b.stopReplica("cp2")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := n.ReviewAccess(ctx, agent.AccessReview{Token: "token-of-scraper", Verb: "get",
		Subresources: []string{"metrics"}}); !errors.Is(err, agent.ErrReviewUnavailable) {
		t.Errorf("with no replica: %v", err)
	}
}

// The server of a node is known by the cluster's authority at the address from which the node is seen, and by no other
// that it claims. Before the cluster has signed, it shows a certificate of its own.
func TestServingCertificate(t *testing.T) {
	b := newTestEnv(t, "cp1")
	b.nodeIPs = []string{"127.0.0.1", "192.0.2.200", "10.96.0.1"}
	n := b.startAgent("w1", nil)
	b.awaitCondition("a certificate of the cluster", func() error {
		cert, err := n.ServingCertificate()
		if err != nil {
			return err
		}
		_, err = cert.Leaf.Verify(x509.VerifyOptions{Roots: b.trust.Pool(),
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
		return err
	})
	cert, err := n.ServingCertificate()
	if err != nil {
		t.Fatal(err)
	}
	// Loopback is everybody's: here no address is left.
	if len(cert.Leaf.IPAddresses)+len(cert.Leaf.DNSNames) > 0 || cert.Leaf.Subject.CommonName != "system:node:w1" {
		t.Errorf("it names %v %v, of %s", cert.Leaf.IPAddresses, cert.Leaf.DNSNames, cert.Leaf.Subject)
	}
	if _, err := cert.Leaf.Verify(x509.VerifyOptions{Roots: n.ClientCAs(),
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err == nil {
		t.Error("it is valid for clients too")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.ContainsFunc(b.records, func(r auditRecord) bool {
		return r.Subresource == "servingcertificate" && r.Name == "w1" && r.Err == nil
	}) {
		t.Error(fmt.Sprint("no record of it: ", b.records))
	}
}
