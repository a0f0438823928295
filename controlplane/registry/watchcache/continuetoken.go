package watchcache

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"keelson.dev/keelson/raftstore"
)

// tokenVersion is the value of the version field in a continue token, as in Kubernetes.
const tokenVersion = "meta.k8s.io/v1"

// continueToken is the decoded continue token of a paged list: the position at which the list
// continues.
type continueToken struct {
	Version string `json:"v"`
	// Revision is the store revision from which all pages of the list are read. It is -1 if that
	// revision was compacted: the list then continues inconsistently, with the current state.
	Revision int64 `json:"rv"`
	// After is the last returned key, relative to the kind's prefix.
	After string `json:"start"`
}

func (t continueToken) encodeToken() string {
	t.Version = tokenVersion
	// Marshaling a struct of strings and a number never fails.
	data, _ := json.Marshal(t)
	return base64.RawURLEncoding.EncodeToString(data)
}

var errContinueToken = errors.New("continue key is not valid")

// parseContinue returns the decoded continue token. It returns an error if the token is malformed,
// or if its key does not have the key prefix of the request (the namespace).
func parseContinue(token, prefix string) (continueToken, error) {
	data, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		return continueToken{}, fmt.Errorf("%w: %v", errContinueToken, err)
	}
	var t continueToken
	if err := json.Unmarshal(data, &t); err != nil {
		return continueToken{}, fmt.Errorf("%w: %v", errContinueToken, err)
	}
	if t.Version != tokenVersion || t.Revision == 0 || t.Revision < -1 || t.After == "" {
		return continueToken{}, errContinueToken
	}
	if !strings.HasPrefix(t.After, prefix) {
		return continueToken{}, fmt.Errorf("%w: it belongs to another request", errContinueToken)
	}
	return t, nil
}

func (t continueToken) atRevision() raftstore.Revision {
	if t.Revision < 0 {
		return 0
	}
	return raftstore.Revision(t.Revision)
}
