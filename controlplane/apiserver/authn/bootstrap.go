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

// Bootstrap recognises bootstrap tokens, "id.secret", which are Secrets of type bootstrap.kubernetes.io/token in
// kube-system.
type Bootstrap struct {
	// Secret returns a Secret of kube-system from memory: anybody may make it be asked for.
	Secret func(ctx context.Context, name string) (*corev1.Secret, bool)
	Clock  func() time.Time
}

// VerifyToken is TokenVerifier. One who guesses learns nothing of why a token is no good.
func (b Bootstrap) VerifyToken(ctx context.Context, token string, _ []string) (TokenIdentity, bool, error) {
	id, secret, ok := bootstrapParts(token)
	if !ok {
		return TokenIdentity{}, false, nil
	}
	s, ok := b.Secret(ctx, bootstrapSecret+id)
	if !ok || s.DeletionTimestamp != nil || s.Type != corev1.SecretTypeBootstrapToken || string(s.Data["token-id"]) != id ||
		subtle.ConstantTimeCompare(s.Data["token-secret"], []byte(secret)) != 1 ||
		string(s.Data["usage-bootstrap-authentication"]) != "true" || b.expired(s) {
		return TokenIdentity{}, false, nil
	}
	groups, err := bootstrapGroups(s)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	return TokenIdentity{User: api.User{Name: bootstrapUser + id, Groups: groups}}, true, nil
}

// bootstrapParts splits a token of six and sixteen small letters and digits.
func bootstrapParts(token string) (id, secret string, ok bool) {
	id, secret, ok = strings.Cut(token, ".")
	return id, secret, ok && len(id) == 6 && len(secret) == 16 && onlyOf(id+secret, smallAlphanumeric)
}

const smallAlphanumeric = "abcdefghijklmnopqrstuvwxyz0123456789"

// mayBootstrap says whether a bootstrap token may give the group: none of the cluster's own.
func mayBootstrap(group string) bool {
	name, ok := strings.CutPrefix(group, bootstrappers+":")
	return ok && name != "" && len(name) <= 256 && onlyOf(name, smallAlphanumeric+":-") &&
		onlyOf(name[len(name)-1:], smallAlphanumeric)
}

func onlyOf(s, letters string) bool { return strings.Trim(s, letters) == "" }

// expired is so too when nobody can tell when it ends.
func (b Bootstrap) expired(s *corev1.Secret) bool {
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
			return nil, fmt.Errorf("bootstrap token: Secret %s/%s: auth-extra-groups names %q: want groups that begin with %s:",
				metav1.NamespaceSystem, s.Name, api.Clip(g, 128), bootstrappers)
		}
		groups = append(groups, g)
	}
	slices.Sort(groups)
	return slices.Compact(groups), nil
}
