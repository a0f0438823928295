package server

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server/rotation"
	"keelson.dev/keelson/internal/wait"
)

// A backup brings back Secrets with tokens by a service account key that was exchanged since. Nobody believes them any more,
// and no exchange replaces them: what is in a Secret is signed anew only at the end of the one that its key goes by.

// lostEvery is how often a leader asks the members again, of which one has not told with which key it signs.
const lostEvery = time.Minute

// keepSecretTokens replaces such tokens, once in a leadership.
func (r *Replica) keepSecretTokens(ctx context.Context, fence uint64) error {
	for {
		if r.signLostAnew(ctx, fence) {
			<-ctx.Done()
			return ctx.Err()
		}
		if err := wait.Delay(ctx, lostEvery); err != nil {
			return err
		}
	}
}

// signLostAnew does so where every member signs as this one: a leader that has itself the key of another time must not
// replace what the others believe.
func (r *Replica) signLostAnew(ctx context.Context, fence uint64) (done bool) {
	lost := r.secretsOfLostKeys()
	if len(lost) == 0 {
		return true
	}
	if r.keys.seen.Load().Active() {
		return false
	}
	signs, _ := r.tokens.KeyIDs()
	for _, m := range membersOf(rotation.ServiceAccountKey, r.askKeys(ctx)) {
		if m.Problem != "" || m.Held.Signs != signs {
			return false
		}
	}
	r.log.Info("tokens in Secrets are by a key that is gone: they are signed anew", "secrets", len(lost))
	// One that was changed in this moment, or that cannot be, is looked at again: it keeps no other from its token.
	if err := r.signAnew(ctx, lost, fence); err != nil {
		r.log.Warn("tokens in Secrets that are by a key that is gone could not all be signed anew", "again in", lostEvery, "err", err)
	}
	return false
}

// secretsOfLostKeys are the Secrets whose token is one of this cluster, for the very account and Secret that it is in, by a key
// that is believed no more. What somebody else has put there is left alone.
func (r *Replica) secretsOfLostKeys() (out []*v1.Secret) {
	accounts := client.Informer[*v1.ServiceAccount](r.informers).GetIndexer()
	for _, o := range client.Informer[*v1.Secret](r.informers).GetStore().List() {
		s, ok := o.(*v1.Secret)
		if !ok || s.Type != v1.SecretTypeServiceAccountToken {
			continue
		}
		text := string(s.Data[v1.ServiceAccountTokenKey])
		key := pki.KeyIDOf(text)
		c, known := pki.SecretClaimsOf(text)
		if !known || key == "" || r.tokens.Accepts(key) || c.Namespace != s.Namespace || c.Secret != s.Name {
			continue
		}
		have, found, err := accounts.GetByKey(c.Namespace + "/" + c.ServiceAccount.Name)
		if account, ok := have.(*v1.ServiceAccount); err == nil && found && ok && string(account.UID) == c.ServiceAccount.UID &&
			s.Annotations[v1.ServiceAccountNameKey] == account.Name && s.Annotations[v1.ServiceAccountUIDKey] == c.ServiceAccount.UID {
			out = append(out, s)
		}
	}
	return out
}
