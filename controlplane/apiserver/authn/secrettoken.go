package authn

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/pki"
)

// Labels of Secrets that hold a service account token.
const (
	LastUsedLabel     = "kubernetes.io/legacy-token-last-used"
	InvalidSinceLabel = "kubernetes.io/legacy-token-invalid-since"
)

const (
	// markInterval is the minimum interval between two attempts of a replica to write the last-used
	// label of the same Secret. It limits writes when the cache is stale or the store does not
	// respond.
	markInterval = time.Minute
	// markPatience is how long a request waits at most until the last-used label is written.
	markPatience = 2 * time.Second
)

// verifyOfSecret verifies a service account token that is stored in a Secret. Each request checks
// again that the Secret contains the token and that the ServiceAccount exists, because changing or
// deleting either of them revokes the token. The result is not cached.
func (s *ServiceAccounts) verifyOfSecret(ctx context.Context, token string, audiences []string) (
	TokenIdentity, bool, error,
) {
	c, err := s.tokens.VerifySecretToken(token)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	good, err := commonAudiences(audiences, s.audiences)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	secret, err := s.tokenSecret(ctx, c, token)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	uid, deletedAt, ok := s.objects.UID(ctx, "serviceaccounts", c.Namespace, c.ServiceAccount.Name)
	switch {
	case !ok:
		return TokenIdentity{}, false,
			fmt.Errorf("service account token has been invalidated: serviceaccount %q no longer exists",
				c.ServiceAccount.Name)
	case uid != c.ServiceAccount.UID:
		return TokenIdentity{}, false,
			fmt.Errorf("service account token has been invalidated: serviceaccount %q has another UID than the token",
				c.ServiceAccount.Name)
	case !deletedAt.IsZero():
		return TokenIdentity{}, false,
			fmt.Errorf("service account token has been invalidated: serviceaccount %q is being deleted",
				c.ServiceAccount.Name)
	}
	s.markSecretUsed(ctx, secret)
	return TokenIdentity{User: c.User(), Audiences: good}, true, nil
}

// tokenSecret returns the Secret that contains the token. It returns an error if the Secret no
// longer exists, contains another token or is labeled as invalid.
func (s *ServiceAccounts) tokenSecret(ctx context.Context, c *pki.SecretClaims, token string) (*corev1.Secret, error) {
	o, _ := s.objects.Get(ctx, "secrets", c.Namespace, c.Secret)
	secret, ok := o.(*corev1.Secret)
	if !ok || secret.DeletionTimestamp != nil {
		return nil, errors.New("service account token has been invalidated: its Secret no longer exists")
	}
	if subtle.ConstantTimeCompare(secret.Data[corev1.ServiceAccountTokenKey], []byte(token)) != 1 {
		return nil, errors.New("service account token has been invalidated: its Secret contains another token")
	}
	if secret.Labels[InvalidSinceLabel] != "" {
		return nil,
			fmt.Errorf("service account token has been invalidated: Secret %s/%s has label %s; remove the label to "+
				"allow the token again, or use 'kubectl create token'",
				secret.Namespace, secret.Name, InvalidSinceLabel)
	}
	return secret, nil
}

// markSecretUsed writes the current date into the last-used label of the Secret, unless the label
// already has it. If the write fails, the request is not rejected; the next request after
// markInterval tries again.
func (s *ServiceAccounts) markSecretUsed(ctx context.Context, secret *corev1.Secret) {
	now := s.clock().UTC()
	today, tomorrow := now.Format(time.DateOnly), now.AddDate(0, 0, 1).Format(time.DateOnly)
	// A replica with a fast clock may have written the next day.
	if was := secret.Labels[LastUsedLabel]; s.markUsed == nil || was == today || was == tomorrow {
		return
	}
	s.mu.Lock()
	at, tried := s.markedDays[secret.UID]
	due := !tried || !now.Before(at.Add(markInterval)) || at.Format(time.DateOnly) != today
	if due {
		if len(s.markedDays) >= maxVerified {
			clear(s.markedDays)
		}
		s.markedDays[secret.UID] = now
	}
	s.mu.Unlock()
	if !due {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, markPatience)
	defer cancel()
	_ = s.markUsed(ctx, secret, today)
}
