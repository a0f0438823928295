package operator

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
)

// verifyRetrySeconds is the value of the Retry-After header, in seconds, of the response while
// another backup is being verified.
const verifyRetrySeconds = "5"

var errBackupTooLarge = errors.New("the backup is too large")

// limitedReader reads at most left bytes from r. If r has more bytes, it returns errBackupTooLarge
// and sets exceeded.
type limitedReader struct {
	r        io.Reader
	left     int64
	exceeded bool
}

// Read implements io.Reader.
func (l *limitedReader) Read(p []byte) (int, error) {
	n, err := l.r.Read(p[:min(int64(len(p)), l.left+1)])
	if l.left -= int64(n); l.left < 0 {
		l.exceeded = true
		return 0, errBackupTooLarge
	}
	return n, err
}

// serveVerify answers POST /cluster/backup/verify: it verifies the backup in the body and answers
// with a description of its contents.
func (v *API) serveVerify(w http.ResponseWriter, req *http.Request) {
	if !requireMethod(w, req, http.MethodPost) {
		return
	}
	if !v.verifying.TryLock() {
		w.Header().Set("Retry-After", verifyRetrySeconds)
		clusterhttp.WriteError(w, http.StatusTooManyRequests,
			fmt.Errorf("replica %s is verifying another backup: try again later, or use another replica",
				v.config.Self.Name))
		return
	}
	defer v.verifying.Unlock()
	body := &limitedReader{r: req.Body, left: v.config.Self.MaxVerifyBytes}
	contents, err := v.config.Backups.Describe(body)
	switch {
	case body.exceeded:
		clusterhttp.WriteError(w, http.StatusRequestEntityTooLarge,
			fmt.Errorf("the backup has more than %d bytes, which is what replica %s verifies with its --memory-limit: "+
				"run 'keelson-controlplane verify FILE' on a machine with enough memory and the key file",
				v.config.Self.MaxVerifyBytes, v.config.Self.Name))
	case err != nil:
		clusterhttp.WriteError(w, http.StatusBadRequest, err)
	default:
		clusterhttp.WriteJSON(w, contents)
	}
}

// serveBackup answers POST /cluster/backup with a backup of the store.
func (v *API) serveBackup(w http.ResponseWriter, req *http.Request, o *operation) {
	if !requireMethod(w, req, http.MethodPost) {
		return
	}
	write, err := v.config.Backups.Writer(req.URL.Query()["recipient"])
	if err != nil {
		clusterhttp.WriteError(w, http.StatusBadRequest, err)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Trailer", api.HeaderBackupSum)
	out, sum := &countingWriter{w: w}, sha256.New()
	err = write(req.Context(), io.MultiWriter(out, sum))
	o.attributes = []any{"bytes", out.n}
	if err != nil {
		o.failure = err.Error()
		if out.n == 0 {
			h.Del("Trailer")
			writeError(w, err)
			return
		}
		panic(http.ErrAbortHandler) // an incomplete backup must not look complete
	}
	h.Set(api.HeaderBackupSum, hex.EncodeToString(sum.Sum(nil)))
}

// countingWriter counts the bytes that it writes to w.
type countingWriter struct {
	w io.Writer
	n int64
}

// Write implements io.Writer.
func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
