package keyrotation

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
)

// A restored backup may contain Secrets with tokens of a service account key that was rotated after
// the backup. These tokens are invalid. A rotation replaces only tokens of its own previous key, so
// the leader replaces tokens of older keys here.

// lostTokensInterval is how often a leader checks again for invalid tokens to replace, while the
// replicas do not all report the same key, or tokens could not be replaced.
const lostTokensInterval = time.Minute

// ReplaceLostTokens replaces the invalid tokens in Secrets. It repeats this until no such token is
// left, and then waits for the end of ctx. The leader runs it once per term.
func (r *Rotator) ReplaceLostTokens(ctx context.Context, fence uint64) error {
	for {
		if r.replaceLostTokens(ctx, fence) {
			<-ctx.Done()
			return ctx.Err()
		}
		if err := wait.Delay(ctx, lostTokensInterval); err != nil {
			return err
		}
	}
}

// replaceLostTokens replaces the tokens that were signed by a key that is no longer trusted. It
// reports whether there was no such token. It replaces nothing unless every member signs with the
// key of this replica: a leader with a stale key must not replace tokens that the other replicas
// accept.
func (r *Rotator) replaceLostTokens(ctx context.Context, fence uint64) (done bool) {
	lost := r.secretsOfLostKeys()
	if len(lost) == 0 {
		return true
	}
	if r.keys.current.Load().Active() {
		return false
	}
	signing, _ := r.config.Tokens.KeyIDs()
	for _, m := range membersOf(rotation.ServiceAccountKey, r.collectReports(ctx)) {
		if m.Problem != "" || m.Keys.Signing != signing {
			return false
		}
	}
	r.config.Log.Info("Secrets have tokens of a removed key: the tokens are replaced", "secrets", len(lost))
	// If a Secret cannot be written, the others are written, and the next check repeats it.
	if err := r.signSecrets(ctx, lost, fence); err != nil {
		r.config.Log.Warn("not all tokens of a removed key could be replaced", "again in",
			lostTokensInterval, "err", err)
	}
	return false
}

// secretsOfLostKeys returns the Secrets whose service account token was signed by a key that is no
// longer trusted. It skips a Secret whose token was not issued for that Secret and its service
// account.
func (r *Rotator) secretsOfLostKeys() (secrets []*v1.Secret) {
	accounts := client.Informer[*v1.ServiceAccount](r.informers).GetIndexer()
	for _, o := range client.Informer[*v1.Secret](r.informers).GetStore().List() {
		s, ok := o.(*v1.Secret)
		if !ok || s.Type != v1.SecretTypeServiceAccountToken {
			continue
		}
		token := string(s.Data[v1.ServiceAccountTokenKey])
		key := pki.ParseKeyID(token)
		claims, valid := pki.ParseSecretClaims(token)
		if !valid || key == "" || r.config.Tokens.Accepts(key) || claims.Namespace != s.Namespace ||
			claims.Secret != s.Name {
			continue
		}
		stored, found, err := accounts.GetByKey(claims.Namespace + "/" + claims.ServiceAccount.Name)
		if account, ok := stored.(*v1.ServiceAccount); err == nil && found && ok &&
			string(account.UID) == claims.ServiceAccount.UID &&
			s.Annotations[v1.ServiceAccountNameKey] == account.Name &&
			s.Annotations[v1.ServiceAccountUIDKey] == claims.ServiceAccount.UID {
			secrets = append(secrets, s)
		}
	}
	return secrets
}
