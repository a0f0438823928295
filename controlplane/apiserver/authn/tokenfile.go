package authn

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"strings"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/filewatch"
)

// maxTokenFile is the maximum size of a static token file in bytes.
const maxTokenFile = 16 << 20

// ReadTokenFile reads a static token file in CSV form. Each line is "token,user,uid" with an
// optional fourth, quoted column of comma-separated groups.
func ReadTokenFile(path string) (*Static, error) {
	data, err := filewatch.Read(path, maxTokenFile)
	if err != nil {
		return nil, fmt.Errorf("reading the static tokens: %w", err)
	}
	tokens, err := parseTokens(data)
	if err != nil {
		return nil, fmt.Errorf("static tokens %s: %w", path, err)
	}
	return NewStatic(tokens), nil
}

// parseTokens parses a static token file. Its errors never contain tokens, because errors are
// logged.
func parseTokens(data []byte) (map[string]api.User, error) {
	rows := csv.NewReader(bytes.NewReader(data))
	rows.FieldsPerRecord = -1
	out := map[string]api.User{}
	for {
		row, err := rows.Read()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			if bad := new(csv.ParseError); errors.As(err, &bad) {
				return nil, fmt.Errorf("line %d: %w", bad.Line, bad.Err)
			}
			return nil, err
		}
		line, _ := rows.FieldPos(0)
		switch {
		case len(row) < 3:
			return nil, fmt.Errorf("line %d has %d columns: want token, user name, user UID and optional groups",
				line, len(row))
		case row[0] == "":
			return nil, fmt.Errorf("line %d has no token", line)
		case row[1] == "":
			return nil, fmt.Errorf("line %d has no user name", line)
		}
		if _, twice := out[row[0]]; twice {
			return nil, fmt.Errorf("line %d repeats a token of an earlier line", line)
		}
		u := api.User{Name: row[1], UID: row[2]}
		if len(row) > 3 && row[3] != "" {
			u.Groups = strings.Split(row[3], ",")
		}
		out[row[0]] = u
	}
}
