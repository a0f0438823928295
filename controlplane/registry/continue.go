package registry

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"keelson.dev/keelson/raftstore"
)

// tokenVersion is the version field of a continue token.
const tokenVersion = "meta.k8s.io/v1"

// continueToken is the position at which a paged list continues.
type continueToken struct {
	Version string `json:"v"`
	// Revision of the snapshot; -1 if that was compacted and the list continues inconsistently with
	// the current state.
	Revision int64 `json:"rv"`
	// After is the last returned key, relative to the kind's prefix.
	After string `json:"start"`
}

func (t continueToken) encode() string {
	t.Version = tokenVersion
	// Marshaling a struct of strings and a number never fails.
	data, _ := json.Marshal(t)
	return base64.RawURLEncoding.EncodeToString(data)
}

var errToken = errors.New("continue key is not valid")

// parseContinue parses a token and checks that it is within the prefix of the request.
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
