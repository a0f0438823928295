package authn

import (
	"context"
	"crypto/subtle"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

const (
	bootstrapUser   = "system:bootstrap:"
	bootstrappers   = "system:bootstrappers"
	bootstrapSecret = "bootstrap-token-"
)

// Bootstrap authenticates bootstrap tokens of the form "id.secret". They are stored as Secrets of
// type bootstrap.kubernetes.io/token in kube-system.
type Bootstrap struct {
	// Secret returns a Secret of kube-system from a cache. It must not read the store, because
	// unauthenticated clients can cause any number of lookups.
	Secret func(ctx context.Context, name string) (*corev1.Secret, bool)
	Clock  func() time.Time
}

// VerifyToken authenticates a bootstrap token. For every invalid token it returns ok=false and no
// error, so that guessing tokens reveals nothing.
func (b Bootstrap) VerifyToken(ctx context.Context, token string, _ []string) (TokenIdentity, bool, error) {
	id, secret, ok := bootstrapParts(token)
	if !ok {
		return TokenIdentity{}, false, nil
	}
	s, ok := b.Secret(ctx, bootstrapSecret+id)
	if !ok || s.DeletionTimestamp != nil || s.Type != corev1.SecretTypeBootstrapToken ||
		string(s.Data["token-id"]) != id ||
		subtle.ConstantTimeCompare(s.Data["token-secret"], []byte(secret)) != 1 ||
		string(s.Data["usage-bootstrap-authentication"]) != "true" || b.isExpired(s) {
		return TokenIdentity{}, false, nil
	}
	groups, err := bootstrapGroups(s)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	return TokenIdentity{User: api.User{Name: bootstrapUser + id, Groups: groups}}, true, nil
}

// bootstrapParts splits a bootstrap token into its ID of 6 and its secret of 16 characters, all
// lower-case letters and digits.
func bootstrapParts(token string) (id, secret string, ok bool) {
	id, secret, ok = strings.Cut(token, ".")
	return id, secret, ok && len(id) == 6 && len(secret) == 16 && containsOnly(id+secret, smallAlphanumeric)
}

const smallAlphanumeric = "abcdefghijklmnopqrstuvwxyz0123456789"

// mayBootstrap reports whether a bootstrap token may grant the group. Only subgroups of
// system:bootstrappers are allowed, but not the groups that the cluster itself uses.
func mayBootstrap(group string) bool {
	name, ok := strings.CutPrefix(group, bootstrappers+":")
	return ok && name != "" && len(name) <= 256 && containsOnly(name, smallAlphanumeric+":-") &&
		containsOnly(name[len(name)-1:], smallAlphanumeric)
}

func containsOnly(s, letters string) bool { return strings.Trim(s, letters) == "" }

// isExpired reports whether the token of the Secret has expired. A token with an unreadable
// expiration time counts as expired.
func (b Bootstrap) isExpired(s *corev1.Secret) bool {
	end := string(s.Data["expiration"])
	if end == "" {
		return false
	}
	at, err := time.Parse(time.RFC3339, end)
	return err != nil || !b.Clock().Before(at)
}

func bootstrapGroups(s *corev1.Secret) ([]string, error) {
	groups := []string{bootstrappers}
	text := string(s.Data["auth-extra-groups"])
	if text == "" {
		return groups, nil
	}
	for _, g := range strings.Split(text, ",") {
		if !mayBootstrap(g) {
			return nil,
				fmt.Errorf("bootstrap token: Secret %s/%s: auth-extra-groups contains %q: want groups "+
					"with the prefix %s:",
					metav1.NamespaceSystem, s.Name, api.Truncate(g, 128), bootstrappers)
		}
		groups = append(groups, g)
	}
	slices.Sort(groups)
	return slices.Compact(groups), nil
}
