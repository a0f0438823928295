package authz

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/filewatch"
)

// ABAC is an authorizer that allows a request if a policy in its policy file matches the request.
type ABAC struct{ policies []abacPolicy }

// abacPolicy is one line of a policy file: the spec of an abac.authorization.kubernetes.io/v1beta1
// Policy.
type abacPolicy struct {
	User            string `json:"user,omitempty"`
	Group           string `json:"group,omitempty"`
	Readonly        bool   `json:"readonly,omitempty"`
	APIGroup        string `json:"apiGroup,omitempty"`
	Resource        string `json:"resource,omitempty"`
	Namespace       string `json:"namespace,omitempty"`
	NonResourcePath string `json:"nonResourcePath,omitempty"`
}

const (
	maxPolicyFile = 16 << 20
	abacVersion   = "abac.authorization.kubernetes.io/v1beta1"
)

// ReadABAC reads a policy file, in which each line is one JSON object. It skips empty lines and
// lines that start with #.
func ReadABAC(path string) (*ABAC, error) {
	data, err := filewatch.Read(path, maxPolicyFile)
	if err != nil {
		return nil, err
	}
	z := &ABAC{}
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, maxPolicyFile)
	for n := 1; lines.Scan(); n++ {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		p, err := parseABAC(line)
		if err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", path, n, err)
		}
		z.policies = append(z.policies, p)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return z, nil
}

func parseABAC(line []byte) (abacPolicy, error) {
	var p struct {
		APIVersion string     `json:"apiVersion"`
		Kind       string     `json:"kind"`
		Spec       abacPolicy `json:"spec"`
		abacPolicy
	}
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return abacPolicy{}, err
	}
	if d.More() {
		return abacPolicy{}, fmt.Errorf("a line must contain one policy")
	}
	switch {
	case p.APIVersion == "" && p.Kind == "":
		return ofVersion0(p.abacPolicy), nil
	case p.APIVersion != abacVersion || p.Kind != "Policy":
		return abacPolicy{}, fmt.Errorf("%s, %s: want %s, Policy", p.APIVersion, p.Kind, abacVersion)
	case p.abacPolicy != abacPolicy{}:
		return abacPolicy{}, fmt.Errorf("the fields of a Policy must be in its spec")
	}
	return expandWildcards(p.Spec), nil
}

// ofVersion0 converts a policy without an apiVersion, in which an omitted field matches everything.
func ofVersion0(policy abacPolicy) abacPolicy {
	if policy.User == "" && policy.Group == "" {
		policy.Group = "*"
	}
	if policy.Namespace == "" && policy.Resource == "" {
		policy.NonResourcePath = "*"
	}
	for _, f := range []*string{&policy.Namespace, &policy.Resource} {
		if *f == "" {
			*f = "*"
		}
	}
	policy.APIGroup = "*"
	return expandWildcards(policy)
}

// expandWildcards replaces the user or group "*" by the group system:authenticated.
func expandWildcards(policy abacPolicy) abacPolicy {
	if policy.User == "*" || policy.Group == "*" {
		policy.User, policy.Group = "", api.GroupAuthenticated
	}
	return policy
}

// Authorize returns Allow if a policy matches, otherwise NoOpinion.
func (z *ABAC) Authorize(_ context.Context, a *Attributes) (Decision, string) {
	for i := range z.policies {
		if z.policies[i].allowsRequest(a) {
			return Allow, ""
		}
	}
	return NoOpinion, "No policy matched."
}

func (p *abacPolicy) allowsRequest(a *Attributes) bool {
	if p.User == "" && p.Group == "" || p.User != "" && p.User != a.User.Name {
		return false
	}
	if p.Group != "" && !slices.Contains(a.User.Groups, p.Group) {
		return false
	}
	if p.Readonly && a.Verb != "get" && a.Verb != "list" && a.Verb != "watch" {
		return false
	}
	if a.Resource == "" {
		prefix, open := strings.CutSuffix(p.NonResourcePath, "*")
		return p.NonResourcePath == a.Path && a.Path != "" || open && strings.HasPrefix(a.Path, prefix)
	}
	same := func(policy, asked string) bool { return policy == "*" || policy == asked }
	return same(p.Namespace, a.Namespace) && p.Resource != "" && same(p.Resource, a.Resource) &&
		same(p.APIGroup, a.APIGroup)
}

// AlwaysAllow is an authorizer that allows every request.
type AlwaysAllow struct{}

// Authorize returns Allow.
func (AlwaysAllow) Authorize(context.Context, *Attributes) (Decision, string) { return Allow, "" }

// AlwaysDeny is an authorizer that allows no request. It does not prevent others from allowing it.
type AlwaysDeny struct{}

// Authorize returns NoOpinion, so that the request is rejected unless another authorizer allows it.
func (AlwaysDeny) Authorize(context.Context, *Attributes) (Decision, string) {
	return NoOpinion, "Everything is forbidden."
}
