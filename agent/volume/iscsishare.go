package volume

import (
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/agent/volume/iscsi"
)

// Pods of a node that use the same iSCSI target share its session, for which the first of them logged in. A pod that names the
// disk itself joins the session only with the same credentials. Volumes of PersistentVolumes join it as they are: an
// administrator chose their target.

// hashRounds is the cost of a hash of credentials: a reader of the record cannot try many passwords.
const hashRounds = 20_000

// hashLogin returns a salted hash of credentials, also of none.
func hashLogin(l iscsi.Login) (string, error) {
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return "", fmt.Errorf("hash of iSCSI credentials: %w", err)
	}
	return hashWith(l, salt)
}

func hashWith(l iscsi.Login, salt []byte) (string, error) {
	text, err := json.Marshal(l)
	if err != nil {
		return "", fmt.Errorf("hash of iSCSI credentials: %w", err)
	}
	key, err := pbkdf2.Key(sha256.New, string(text), salt, hashRounds, sha256.Size)
	if err != nil {
		return "", fmt.Errorf("hash of iSCSI credentials: %w", err)
	}
	return hex.EncodeToString(salt) + ":" + hex.EncodeToString(key), nil
}

// sameLogin reports whether a hash is that of the credentials. An empty hash, of an earlier agent, is that of any.
func sameLogin(hash string, l iscsi.Login) bool {
	if hash == "" {
		return true
	}
	text, _, _ := strings.Cut(hash, ":")
	salt, err := hex.DecodeString(text)
	if err != nil {
		return false
	}
	own, err := hashWith(l, salt)
	return err == nil && subtle.ConstantTimeCompare([]byte(own), []byte(hash)) == 1
}

// iscsiShared sets the hash of the pod's credentials in r. It returns an error when the pod names the disk itself and the node's
// session with the target belongs to pods with other credentials.
func (v *Volumes) iscsiShared(s iscsiSource, file string, r *iscsiRecord) error {
	login, err := v.iscsiLogin(s)
	if err != nil {
		if s.claimed != "" {
			return nil // a session that is there is used without the secret
		}
		return err
	}
	if r.Secret, err = hashLogin(login); err != nil || s.claimed != "" {
		return err
	}
	others, err := v.iscsiUsers(file, *r)
	if err != nil {
		return err
	}
	// A pod whose login failed holds no session, and must not keep others from the target. After a crash the record of the
	// pod that logged in may not say so.
	certain := false
	for _, o := range others {
		certain = certain || o.LoggedIn
	}
	if !certain && !v.iscsiHas(s) {
		return nil
	}
	holder := ""
	for other, o := range others {
		if certain && !o.LoggedIn {
			continue
		}
		if sameLogin(o.Secret, login) {
			return nil
		}
		holder = filepath.Base(filepath.Dir(filepath.Dir(other)))
	}
	if holder == "" {
		return nil // the session is none of pods
	}
	return fmt.Errorf("iSCSI target %s is in use on this node by pod %s with other credentials (chapAuthSession, chapAuthDiscovery, secretRef): "+
		"name the same credentials, or place the pod on another node", r.Target, holder)
}

// iscsiHas reports whether the kernel has a device of the disk.
func (v *Volumes) iscsiHas(s iscsiSource) bool {
	has, err := v.cfg.ISCSI.Has(s.disk)
	return err == nil && has
}
