package membership

import (
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
)

// initialTokensFile is the content of founder.json, in which a new cluster stores its first join
// tokens. They cannot be in the store, because it does not exist when the cluster is created.
type initialTokensFile struct {
	Tokens        []string  `json:"tokens"`
	Expires       time.Time `json:"expires"`
	ReplicasUntil time.Time `json:"replicasUntil"` // expiry of the token for replicas
	NodeUses      int       `json:"nodeUses"`
	ReplicaUses   int       `json:"replicaUses"`
}

// InitialTokens are the first join tokens of a cluster. They are in a file on the replica that
// created the cluster, until StoreTokens has written them to the store.
type InitialTokens struct {
	path       string
	hasPending atomic.Bool
}

// loadInitialTokens reads the first join tokens from founder.json. If the file does not exist, the
// result contains no tokens.
func loadInitialTokens(dir datadir.Dir) (*InitialTokens, error) {
	t := &InitialTokens{path: filepath.Join(dir.Path, datadir.FounderFile)}
	var f initialTokensFile
	if _, err := datadir.ReadJSON(t.path, &f); err != nil {
		return nil, err
	}
	t.hasPending.Store(len(f.Tokens) > 0)
	return t, nil
}

// HasPending reports whether this replica has join tokens that are not in the store yet.
func (t *InitialTokens) HasPending() bool { return t.hasPending.Load() }

// StoreTokens writes the join tokens to the store, by a call of record for each of them, and then
// blocks until ctx ends.
func (t *InitialTokens) StoreTokens(
	ctx context.Context, record func(context.Context, pki.Token, pki.Grant) error,
) error {
	if err := t.storePendingTokens(ctx, record); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (t *InitialTokens) storePendingTokens(
	ctx context.Context, record func(context.Context, pki.Token, pki.Grant) error,
) error {
	var f initialTokensFile
	found, err := datadir.ReadJSON(t.path, &f)
	if err != nil || !found || len(f.Tokens) == 0 {
		return err
	}
	for _, text := range f.Tokens {
		token, err := pki.ParseToken(text)
		if err != nil {
			return fmt.Errorf("%s: %w", t.path, err)
		}
		grant := pki.Grant{Expires: f.Expires, Uses: f.NodeUses, Note: "created with the cluster"}
		if token.Role == pki.RoleControlPlane {
			grant.Expires, grant.Uses = f.ReplicasUntil, f.ReplicaUses
		}
		if err := record(ctx, token, grant); err != nil {
			return err
		}
	}
	// The file remains, because it marks the replica that created the cluster. Only the tokens in
	// it are deleted.
	if err := datadir.WriteJSON(t.path, initialTokensFile{Expires: f.Expires}); err != nil {
		return err
	}
	t.hasPending.Store(false)
	return nil
}
