package registry

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"keelson.dev/keelson/raftstore"
)

// tokenVersion marks the form of a continue token.
const tokenVersion = "meta.k8s.io/v1"

// continueToken says where a paged list goes on.
type continueToken struct {
	Version string `json:"v"`
	// Revision of the snapshot; -1 when a consistent one is no longer to be had
	// and the list goes on with the present state.
	Revision int64 `json:"rv"`
	// After is the last key returned, below the kind's prefix.
	After string `json:"start"`
}

func (t continueToken) encode() string {
	t.Version = tokenVersion
	// A struct of two strings and a number always marshals.
	data, _ := json.Marshal(t)
	return base64.RawURLEncoding.EncodeToString(data)
}

var errToken = errors.New("continue key is not valid")

// parseContinue reads a token and checks that it stays inside the prefix that the request may list.
func parseContinue(s, prefix string) (continueToken, error) {
	data, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return continueToken{}, fmt.Errorf("%w: %v", errToken, err)
	}
	var t continueToken
	if err := json.Unmarshal(data, &t); err != nil {
		return continueToken{}, fmt.Errorf("%w: %v", errToken, err)
	}
	if t.Version != tokenVersion || t.Revision == 0 || t.Revision < -1 || t.After == "" {
		return continueToken{}, errToken
	}
	if !strings.HasPrefix(t.After, prefix) {
		return continueToken{}, fmt.Errorf("%w: it belongs to another request", errToken)
	}
	return t, nil
}

func (t continueToken) at() raftstore.Revision {
	if t.Revision < 0 {
		return 0
	}
	return raftstore.Revision(t.Revision)
}
