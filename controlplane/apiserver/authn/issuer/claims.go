package issuer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"

	"keelson.dev/keelson/controlplane/api"
)

// claims are the claims of a verified token, by name.
type claims map[string]json.RawMessage

func (c claims) decodeClaim(name string, target any) error {
	raw, ok := c[name]
	if !ok {
		return errors.New("claim not present")
	}
	return json.Unmarshal(raw, target)
}

// credentialID is the key of the user's extra field that identifies the token. Its value contains
// the jti claim.
const credentialID = "authentication.kubernetes.io/credential-id"

// mapUser maps the claims to a user by the claim mappings of the issuer. It returns an error if a
// validation rule of the issuer does not hold.
func (i *Issuer) mapUser(ctx context.Context, c claims) (u api.User, err error) {
	var value traits.Mapper
	if m := &i.mapper; m.Username != nil || m.Groups != nil || m.UID != nil || m.Extra != nil ||
		m.ClaimValidationRules != nil {
		if value, err = c.celValue(); err != nil {
			return u, err
		}
	}
	if u.Name, err = i.mapUsername(ctx, c, value); err != nil {
		return u, err
	}
	if u.Groups, err = i.mapGroups(ctx, c, value); err != nil {
		return u, err
	}
	if u.UID, err = i.mapUID(ctx, c, value); err != nil {
		return u, err
	}
	if u.Extra, err = i.mapExtra(ctx, c, value); err != nil {
		return u, err
	}
	if err := i.validateClaims(ctx, c, value); err != nil {
		return u, err
	}
	return u, i.validateUser(ctx, u)
}

func (i *Issuer) mapUsername(ctx context.Context, c claims, value traits.Mapper) (string, error) {
	var name string
	if i.mapper.Username != nil {
		r, err := i.mapper.Username.EvalClaimMapping(ctx, value)
		if err != nil {
			return "", fmt.Errorf("error evaluating username claim expression: %w", err)
		}
		if name, err = textValue(r.EvalResult); err != nil {
			return "", fmt.Errorf("error evaluating username claim expression: %w", err)
		}
		if name == "" {
			return "", errors.New("empty username via CEL expression is not allowed")
		}
		return name, nil
	}
	m := i.config.ClaimMappings.Username
	if err := c.decodeClaim(m.Claim, &name); err != nil {
		return "", fmt.Errorf("parse username claims %q: %w", m.Claim, err)
	}
	if _, said := c["email_verified"]; said && m.Claim == "email" {
		var verified bool
		if err := c.decodeClaim("email_verified", &verified); err != nil {
			return "", fmt.Errorf("parse 'email_verified' claim: %w", err)
		}
		if !verified {
			return "", errors.New("email not verified")
		}
	}
	if name == "" {
		return "", fmt.Errorf("the username claim %q is empty", m.Claim)
	}
	return withPrefix(m.Prefix, name), nil
}

func withPrefix(prefix *string, s string) string {
	if prefix == nil {
		return s
	}
	return *prefix + s
}

func (i *Issuer) mapGroups(ctx context.Context, c claims, value traits.Mapper) ([]string, error) {
	if i.mapper.Groups != nil {
		r, err := i.mapper.Groups.EvalClaimMapping(ctx, value)
		if err != nil {
			return nil, fmt.Errorf("error evaluating group claim expression: %w", err)
		}
		groups, err := textValues(r.EvalResult)
		if err != nil {
			return nil, fmt.Errorf("error evaluating group claim expression: %w", err)
		}
		return groups, nil
	}
	m := i.config.ClaimMappings.Groups
	raw, ok := c[m.Claim]
	if m.Claim == "" {
		return nil, nil
	}
	if !ok {
		return nil, notDistributed(c, m.Claim)
	}
	var groups []string
	if json.Unmarshal(raw, &groups) != nil {
		var one string
		if err := json.Unmarshal(raw, &one); err != nil {
			return nil, fmt.Errorf("parse groups claim %q: want a string or a list of strings", m.Claim)
		}
		groups = []string{one}
	}
	for n := range groups {
		groups[n] = withPrefix(m.Prefix, groups[n])
	}
	return groups, nil
}

// notDistributed returns an error if the claim is a distributed claim: only a reference to its
// value is in the token. Without the groups in such a claim, the user could get other permissions
// than intended.
func notDistributed(c claims, claim string) error {
	var names map[string]json.RawMessage
	if _, ok := c["_claim_names"]; !ok {
		return nil
	}
	if err := c.decodeClaim("_claim_names", &names); err != nil {
		return fmt.Errorf("parsing distributed claim names: %w", err)
	}
	if _, ok := names[claim]; ok {
		return fmt.Errorf("the claim %q is distributed, which is not supported: configure the issuer to include it in "+
			"the token", claim)
	}
	return nil
}

func (i *Issuer) mapUID(ctx context.Context, c claims, value traits.Mapper) (uid string, err error) {
	if i.mapper.UID != nil {
		r, err := i.mapper.UID.EvalClaimMapping(ctx, value)
		if err != nil {
			return "", fmt.Errorf("error evaluating uid claim expression: %w", err)
		}
		if uid, err = textValue(r.EvalResult); err != nil {
			return "", fmt.Errorf("error evaluating uid claim expression: %w", err)
		}
		return uid, nil
	}
	if name := i.config.ClaimMappings.UID.Claim; name != "" {
		if err := c.decodeClaim(name, &uid); err != nil {
			return "", fmt.Errorf("parse uid claim %q: %w", name, err)
		}
	}
	return uid, nil
}

func (i *Issuer) mapExtra(ctx context.Context, c claims, value traits.Mapper) (map[string][]string, error) {
	out := map[string][]string{}
	var jti string
	if c.decodeClaim("jti", &jti) == nil && jti != "" {
		out[credentialID] = []string{"JTI=" + jti}
	}
	if i.mapper.Extra != nil {
		results, err := i.mapper.Extra.EvalClaimMappings(ctx, value)
		if err != nil {
			return nil, fmt.Errorf("error evaluating extra claim expression: %w", err)
		}
		for _, r := range results {
			m, ok := r.ExpressionAccessor.(*authenticationcel.ExtraMappingExpression)
			if !ok {
				return nil, fmt.Errorf("an extra claim expression has the unexpected type %T", r.ExpressionAccessor)
			}
			values, err := textValues(r.EvalResult)
			if err != nil {
				return nil, fmt.Errorf("error evaluating extra claim expression: %s: %w", m.Expression, err)
			}
			if len(values) > 0 {
				out[m.Key] = values
			}
		}
	}
	if len(out) == 0 {
		return nil, nil
	}
	return out, nil
}

func (i *Issuer) validateClaims(ctx context.Context, c claims, value traits.Mapper) error {
	for name, want := range i.required {
		var got string
		if err := c.decodeClaim(name, &got); err != nil {
			return fmt.Errorf("required claim %s: %w", name, err)
		}
		if got != want {
			return fmt.Errorf("required claim %s value does not match. Got = %s, want = %s", name,
				api.Truncate(got, 128), want)
		}
	}
	if i.mapper.ClaimValidationRules == nil {
		return nil
	}
	results, err := i.mapper.ClaimValidationRules.EvalClaimMappings(ctx, value)
	if err == nil {
		err = allTrue(results)
	}
	if err != nil {
		return fmt.Errorf("error evaluating claim validation expression: %w", err)
	}
	return nil
}

func (i *Issuer) validateUser(ctx context.Context, u api.User) error {
	if i.mapper.UserValidationRules == nil {
		return nil
	}
	value, ok := nativeToCEL(map[string]any{"username": u.Name, "uid": u.UID, "groups": u.Groups,
		"extra": u.Extra}).(traits.Mapper)
	if !ok {
		return errors.New("converting the user to a CEL value failed")
	}
	results, err := i.mapper.UserValidationRules.EvalUser(ctx, value)
	if err == nil {
		err = allTrue(results)
	}
	if err != nil {
		return fmt.Errorf("error evaluating user info validation rule: %w", err)
	}
	return nil
}

// allTrue returns an error that names the first rule with a result other than true; nil if all
// results are true.
func allTrue(results []authenticationcel.EvaluationResult) error {
	for _, r := range results {
		held, ok := r.EvalResult.(types.Bool)
		if !ok {
			return errors.New("validation expression must return a boolean")
		}
		if held {
			continue
		}
		message := ""
		switch e := r.ExpressionAccessor.(type) {
		case *authenticationcel.ClaimValidationCondition:
			message = e.Message
		case *authenticationcel.UserValidationCondition:
			message = e.Message
		}
		return fmt.Errorf("validation expression '%s' failed: %s", r.ExpressionAccessor.GetExpression(), message)
	}
	return nil
}

func textValue(v ref.Val) (string, error) {
	s, ok := v.(types.String)
	if !ok {
		return "", errors.New("the expression must return a string")
	}
	return string(s), nil
}

// textValues converts a CEL string or list of strings to Go strings. It omits empty strings. null
// yields nil.
func textValues(v ref.Val) ([]string, error) {
	switch v := v.(type) {
	case types.Null:
		return nil, nil
	case types.String:
		if v == "" {
			return nil, nil
		}
		return []string{string(v)}, nil
	case traits.Lister:
		var out []string
		for it := v.Iterator(); it.HasNext() == types.True; {
			s, ok := it.Next().(types.String)
			if !ok {
				return nil, errors.New("the expression must return a string or a list of strings")
			}
			if s != "" {
				out = append(out, string(s))
			}
		}
		return out, nil
	}
	return nil, errors.New("the expression must return a string or a list of strings")
}
